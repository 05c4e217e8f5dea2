"""A bundle says in words what it is."""

from offramp.export.card import model_card

DOCUMENT = {
    "name": "net",
    "version": "2",
    "producer": "offramp 1",
    "created": "2026-01-01",
    "classes": [f"c{k}" for k in range(30)],
    "inputs": [{"name": "ids", "dtype": "int64", "shape": ["batch", "seq"]}],
    "blocks": [{"flops": "batch*(10*seq)", "params": 1200}, {"flops": "batch*(20*seq)", "params": 3}],
    "exits": [{"name": "early"}, {"name": "late"}],
    "rows_independent": True,
    "verified": {"sizes": [{"batch": 3, "seq": 8}], "max_difference": 1.5e-7, "against": "torch"},
}


def test_it_says_what_a_row_costs_at_each_exit_and_what_was_verified():
    card = model_card(DOCUMENT)
    assert card.startswith("# net 2\n")
    assert "| exit | weights its block uses | FLOPs of a row that leaves there (seq 8) |" in card
    assert "| early | 1,200 | 80 |\n| late | 3 | 240 |" in card
    assert "- `ids`: int64 [batch, seq]" in card
    assert "logits differ by at most 1.5e-07" in card
    assert "A row's answer doesn't depend on the rows beside it." in card
    assert "c19, …" in card


def test_it_promises_nothing_and_leaves_the_licence_to_its_maker():
    card = model_card({**DOCUMENT, "rows_independent": False})
    assert "A row's answer depends on the rows beside it." in card
    assert "None until `offramp calibrate` has chosen thresholds" in card
    assert "Not told at export" in card
