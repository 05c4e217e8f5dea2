"""The columns of the report's tables."""

from offramp.runtime.jobs.bundles.inspect_page import readable
from offramp.runtime.jobs.pages.tables import (
    NONE,
    Column,
    Format,
    abstains,
    count,
    flag,
    four,
    held,
    long,
    name,
    percent,
    text,
)


def flops(value: float | None) -> str:
    return NONE if value is None else readable(value)


def chosen(value: object) -> str:
    return "<span class='good'>chosen</span>" if value else ""


def ends(form: Format) -> tuple[Column, Column]:
    return Column("from", "low", form, "95% interval"), Column("to", "high", form, "95% interval")


POINT = Column("point", "point", name)
POINTS = [
    POINT,
    Column("accuracy", "accuracy", percent),
    Column("drop", "drop", percent),
    Column("FLOPs of full", "flops_fraction", percent),
    Column("answered", "coverage", percent),
    Column("error among answered", "risk", percent),
    Column("test rows", "rows", count, "fit, select, certify, test"),
]
# Where times are known: behind the FLOPs.
TIMES = [Column("ms a row", "ms", four, "milliseconds"), Column("time of full", "ms_fraction", percent, "milliseconds")]
PROMISES = [
    POINT,
    Column("promise", "promise"),
    Column("at most", "target", percent, "promise"),
    Column("held", "held", held),
    Column("seen in test", "seen", percent, "95% interval"),
    Column("δ", "delta", percent),
    Column("certified by", "certified"),
    Column("bound", "bound", percent),
    Column("rules tried", "tested", count),
    Column("δ spent", "level", percent, "δ"),
    Column("test", "test", text, "promise"),
]
ESTIMATES = [
    POINT,
    Column("estimate", "estimate"),
    Column("at most", "target_said", text, "estimate"),
    Column("within", "within", held),
    Column("seen in test", "seen_said", text, "95% interval"),
    Column("rows it was chosen on", "chosen_on", count),
    Column("kept in that", "how", long),
]
CHECKS = [
    Column("what", "figure"),
    Column("point", "point", name),
    Column("certify", "certify", count, "fit, select, certify, test"),
    Column("of", "certify_rows", count),
    Column("test", "test", count, "fit, select, certify, test"),
    Column("of", "test_rows", count),
    Column("p", "p_value", four),
    Column("p (Holm)", "p_holm", four),
]
ABSTAIN = [
    Column("abstains below", "abstain_below", abstains, "abstention"),
    Column("as confidence", "abstain_below_confidence", percent, "confidence"),
]
CLASSES = [
    Column("class", "name", name),
    Column("labelled rows", "labelled", count),
    Column("share", "share", percent),
    Column("test rows", "rows", count),
    Column("right", "right", count),
    Column("accuracy", "accuracy", percent),
    Column("full model", "full", percent),
    Column("answered so", "answered_so", count),
    Column("most often taken for", "taken_for", name),
    Column("times", "times", count),
]
MISTAKES = [
    Column("row of the records", "row", count),
    Column("label", "label", name),
    Column("answer", "answer", name),
    Column("confidence", "confidence", percent),
    Column("left at exit", "exit", count, "exit"),
    Column("full model's answer", "full_answer", name, "full model"),
]
EXITS = [
    Column("exit", "exit"),
    Column("accuracy", "accuracy", percent),
    Column("FLOPs", "flops", flops),
    Column("ms, one row alone", "ms", four, "milliseconds"),
    Column("EEFP", "eefp", four),
    Column("AUROC_f", "auroc_f", four),
    Column("AURC", "aurc", four),
    Column("AUGRC", "augrc", four),
    Column("ECE", "ece", four),
]
AT_POINTS = [
    POINT,
    Column("exit", "exit"),
    Column("share", "share", percent),
    Column("reached by", "reached_by", count),
    Column("accuracy", "accuracy", percent),
    Column("confidence", "confidence", percent),
    Column("calibrator", "calibrator"),
    Column("n·ConfCE^corr", "n_confce_corr", four),
    Column("before", "n_confce_corr_before", four),
    Column("n·LinCE^cw", "n_lince_cw", four),
    Column("before", "n_lince_cw_before", four),
    Column("ECE", "ece", four),
    Column("before", "ece_before", four),
    Column("MCS", "mcs", four),
    Column("wsMCS", "ws_mcs", four),
    Column("AUROC_f", "auroc_f", four),
    Column("AURC", "aurc", four),
    Column("AUGRC", "augrc", four),
]
CONFIDENT_CLASSES = [
    POINT,
    Column("exit", "exit"),
    Column("classes over-confident", "share", percent),
    Column("most over-confident: MCS (rows answered so)", "over", long, "MCS"),
    Column("most under-confident", "under", long, "MCS"),
]
TRIED = [
    POINT,
    Column("exits", "exits"),
    Column("calibrator", "calibrator"),
    Column("", "chosen", chosen),
    Column("why", "why", long),
    Column("rows", "rows", count),
    Column("n·ConfCE^corr", "confce_corr", four),
    Column("± to best", "standard_error", four),
    Column("n·LinCE^cw", "lince_cw", four),
    Column("rise at most", "lince_upper", percent),
    Column("EEFP", "eefp", four),
    Column("raw", "eefp_raw", four),
    Column("ECE", "ece", four),
    Column("NLL", "nll", four),
]
COMPARED = [
    POINT,
    Column("figure", "figure"),
    Column("rows", "rows", count),
    Column("old", "old", four),
    Column("new", "new", four),
    Column("difference", "difference", four),
    *ends(four),
    Column("p", "p_value", four),
    Column("worse", "worse", flag),
]
SHIFT = Column("shift", "shift", name)
SHIFTS = [
    SHIFT,
    POINT,
    Column("rows", "rows", count),
    Column("out of scope", "out_of_scope", count),
    Column("accuracy", "accuracy", percent),
    Column("drop", "drop", percent),
    Column("FLOPs of full", "flops_fraction", percent),
    Column("abstained", "abstained", percent),
    Column("on test", "abstained_on_test", percent),
    Column("times", "abstention_ratio", four),
    Column("error among answered", "risk", percent),
    Column("mixed with test", "risk_mixed_with_test", percent),
    Column("AUROC_f", "auroc_f", four),
    Column("AURC", "aurc", four),
    Column("protocol", "protocol"),
]
SHIFT_PROMISES = [
    SHIFT,
    POINT,
    Column("promise", "promise"),
    Column("at most", "target", percent, "promise"),
    Column("seen there", "seen", percent, "95% interval"),
    Column("exceeded by", "excess", percent),
    Column("held", "held", held),
]
SHIFT_ESTIMATES = [
    SHIFT,
    POINT,
    *ESTIMATES[1:2],
    Column("at most", "target_said", text, "estimate"),
    Column("seen there", "seen_said", text, "95% interval"),
    Column("within", "within", held),
]
SUBGROUPS = [
    Column("group", "value", name),
    POINT,
    Column("rows", "rows", count),
    Column("accuracy", "accuracy", percent),
    Column("drop", "drop", percent),
    Column("error among answered", "risk", percent),
    Column("answered", "coverage", percent),
    Column("FLOPs of full", "flops_fraction", percent),
    Column("confidence − accuracy", "confidence_minus_accuracy", percent, "MCS"),
]
KEPT = [POINT, Column("of version", "from_version"), *POINTS[1:]]
