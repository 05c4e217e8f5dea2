"""What can be set on a server, by argument or by an OFFRAMP_ environment variable."""

import re
from pathlib import Path
from typing import Any, Literal, Self

from offramp.runtime.errors import InputError
from offramp.runtime.execution.cpu.session import AWAKE
from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

# Kubernetes says where the service called offramp is: OFFRAMP_PORT=tcp://10.0.0.7:8000.
_LINK = re.compile(r"(tcp|udp|sctp)://", re.IGNORECASE)


class _Environment(EnvSettingsSource):
    """The environment without what nobody set for us: empty variables, and Kubernetes' links to services."""

    def __call__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__call__().items() if not _is_foreign(value)}


def _is_foreign(value: Any) -> bool:
    return isinstance(value, str) and (not value.strip() or _LINK.match(value) is not None)


class Settings(BaseSettings):
    """Settings of `offramp serve`; each is also read from the environment, OFFRAMP_PORT=8000 for instance.

    An empty variable is as none, and so is what Kubernetes sets for a service: OFFRAMP_PORT=tcp://10.0.0.7:8000.
    """

    model_config = SettingsConfigDict(env_prefix="OFFRAMP_", extra="forbid", frozen=True)

    bundle: Path | None = Field(None, description="folder written by `offramp export`")
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for every interface")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    operating_point: str = Field("full", description="operating point of requests that name none")
    device: str = Field("cpu", description="where blocks run: cpu, cuda, cuda:N or torch:cuda")
    workers: int = Field(1, ge=1, le=256, description="processes behind the port, each with its own model")
    threads: int | None = Field(
        None, ge=1, description="threads a block runs on; default: the CPUs there are, shared by the workers"
    )
    spin_us: int = Field(AWAKE, ge=0, le=1_000_000, description="microseconds that threads wait awake for more work")
    lanes: int | None = Field(
        None, ge=1, le=64, description="batches that run at the same time, sharing those threads; default: 2 on a CPU"
    )
    batching: Literal["auto", "graph", "stages"] = Field(
        "auto", description="batch rows in the cascade graph, anew at each stage, or as times measured here say"
    )
    overload_operating_point: str | None = Field(
        None, description="operating point of requests that name none while overload_rows wait"
    )
    overload_rows: int = Field(1024, ge=1, description="rows that wait when overload_operating_point takes over")
    recalibration: str | None = Field(
        None,
        min_length=1,
        description="SQLite file, or postgresql://…, where answered rows and labels are kept; default: nowhere",
    )
    recalibration_mode: Literal["off", "observe", "propose", "automatic"] | None = Field(
        None, description="what is done with labels; default: as that file says, which begins with observe"
    )
    recalibration_shadow: float = Field(
        0.002, ge=0, le=1, description="share of the rows that leave early to be run to the end after their answer"
    )
    recalibration_share: float = Field(
        1.0, gt=0, le=1, description="most of the rows that judge a candidate that one client may have labelled"
    )
    recalibration_rows: int = Field(10_000, ge=1, description="newest rows of a point that figures and fits are from")
    kept_rows: int = Field(100_000, ge=1, description="answered rows that are kept; the oldest go first")
    kept_bytes: int = Field(512 * 2**20, ge=1, description="bytes that they may hold")
    kept_days: float = Field(30.0, gt=0, description="days after which they go")
    kept_unflushed: int = Field(2048, ge=1, description="rows that wait for the disk at most: what a crash can lose")
    kept_durably: bool = Field(False, description="answer only when the row is on the disk: a crash then loses none")
    stalled_after: float = Field(
        60.0, gt=0, description="seconds a batch may run until the server isn't ready any more"
    )
    max_rows_per_request: int = Field(16_384, ge=1, description="rows in one request; more is 413")
    max_queued_rows: int = Field(65_536, ge=1, description="rows that may wait in all; more is 429")
    max_body_bytes: int = Field(32 * 2**20, ge=1, description="bytes of one request body, unpacked; more is 413")
    max_decoded_bytes: int = Field(
        128 * 2**20, ge=1, description="bytes that a body's numbers may take once decoded, 40 each; more is 413"
    )
    timeout: float = Field(300.0, gt=0, description="seconds a request may take if it doesn't say; then it's 503")
    max_bytes_in_flight: int = Field(
        512 * 2**20, ge=1, description="bytes that all requests and unread answers may take in memory; more is 429"
    )
    max_connections: int = Field(
        1024, ge=1, description="connections at a time; one more takes the place of the client that idles longest"
    )
    header_timeout: float = Field(10.0, gt=0, description="seconds a client may take to send a request's head")
    body_timeout: float = Field(30.0, gt=0, description="seconds in which a client that sends a body may send nothing")
    write_timeout: float = Field(
        30.0, gt=0, description="seconds in which a client must take 64 KiB of its answer, or all that is left"
    )
    keep_alive: float = Field(
        75.0, gt=0, description="seconds a connection without a request is kept; more than the proxy in front keeps it"
    )
    drain_timeout: float = Field(
        25.0, gt=0, description="seconds from SIGTERM to the exit; what isn't answered by then gets 503"
    )
    log_level: Literal["critical", "error", "warning", "info", "debug"] = Field(
        "warning", description="what the server logs; info has lines for each request"
    )

    def of_a_worker(self, cpus: int) -> Self:
        """The settings of each of the workers: their threads share the CPUs."""
        return self if self.threads else self.model_copy(update={"threads": max(1, cpus // self.workers)})

    @property
    def row_limit(self) -> int:
        """Rows in one request: one that could never fit in the queue is refused for good, not for now."""
        return min(self.max_rows_per_request, self.max_queued_rows)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, _Environment(settings_cls)

    @classmethod
    def of(cls, **given: object) -> Self:
        """Settings from arguments, None meaning not given, and the environment.

        Raises InputError naming the first setting that is out of range, or that nothing would heed.
        """
        try:
            made = cls(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            raise InputError(f"{name} is {first.get('input')!r}: {first['msg']}.") from error
        if made.recalibration is None and made.recalibration_mode not in (None, "off"):
            raise InputError(
                f"recalibration_mode is {made.recalibration_mode!r}, but recalibration, where labels go, isn't set."
            )
        return made
