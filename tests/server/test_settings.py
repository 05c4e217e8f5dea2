"""Settings: arguments before the environment before defaults, and what is out of range is named."""

import pytest
from offramp.runtime import InputError
from offramp.server import Settings


def test_an_argument_wins_over_the_environment_and_that_over_the_default(monkeypatch):
    assert Settings.of().port == 8000
    monkeypatch.setenv("OFFRAMP_PORT", "9000")
    monkeypatch.setenv("OFFRAMP_LANES", "3")
    assert (Settings.of().port, Settings.of(port=9001).port) == (9000, 9001)
    assert Settings.of(port=None, lanes=None).lanes == 3, "an argument that is not given hides nothing"
    assert Settings.of(port=0).port == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 65536),
        ("port", -1),
        ("port", "http"),
        ("threads", 0),
        ("lanes", 0),
        ("lanes", 65),
        ("max_rows_per_request", 0),
        ("max_queued_rows", 0),
        ("max_body_bytes", 0),
        ("timeout", 0),
        ("timeout", -1.5),
        ("timeout", float("nan")),
        ("header_timeout", 0),
        ("body_timeout", -1),
        ("write_timeout", 0),
        ("keep_alive", 0),
        ("drain_timeout", 0),
        ("max_connections", 0),
        ("max_bytes_in_flight", 0),
        ("log_level", "loud"),
    ],
)
def test_a_setting_out_of_range_is_named_with_its_value(name, value, monkeypatch):
    with pytest.raises(InputError, match=rf"^{name} is {value!r}: "):
        Settings.of(**{name: value})
    monkeypatch.setenv(f"OFFRAMP_{name.upper()}", str(value))
    with pytest.raises(InputError, match=rf"^{name} is '{value}': "):
        Settings.of()


@pytest.mark.parametrize("value", ["", " ", "\t", "tcp://10.0.0.7:8000", "TCP://[fd00::7]:8000", "udp://10.0.0.7:53"])
@pytest.mark.parametrize("name", list(Settings.model_fields))
def test_empty_variables_and_kubernetes_links_are_as_unset(name, value, monkeypatch):
    default = getattr(Settings.of(), name)
    monkeypatch.setenv(f"OFFRAMP_{name.upper()}", value)
    assert getattr(Settings.of(), name) == default


@pytest.mark.parametrize("value", ["tcp:8000", "8000/tcp", "://"])
def test_a_port_that_is_only_mistyped_is_still_named(value, monkeypatch):
    monkeypatch.setenv("OFFRAMP_PORT", value)
    with pytest.raises(InputError, match=r"^port is "):
        Settings.of()


@pytest.mark.parametrize("mode", ["observe", "propose", "automatic"])
def test_a_mode_without_a_store_would_learn_nothing(mode):
    with pytest.raises(InputError, match=f"recalibration_mode is '{mode}', but recalibration, where labels go, isn't"):
        Settings.of(recalibration_mode=mode)
    assert Settings.of(recalibration_mode="off").recalibration is None
    assert Settings.of(recalibration_mode=mode, recalibration="kept.db").recalibration_mode == mode


def test_a_store_has_a_place():
    with pytest.raises(InputError, match="recalibration is ''"):
        Settings.of(recalibration="")


def test_a_setting_that_there_is_none_of_is_refused():
    with pytest.raises(InputError, match="prot is 8000"):
        Settings.of(prot=8000)


def test_a_request_that_could_never_fit_in_the_queue_is_too_large():
    assert Settings.of(max_rows_per_request=100, max_queued_rows=40).row_limit == 40
    assert Settings.of(max_rows_per_request=100, max_queued_rows=400).row_limit == 100


def test_settings_do_not_change_once_made():
    with pytest.raises(ValueError, match="frozen"):
        Settings.of().port = 1
