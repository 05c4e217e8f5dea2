"""The field's words, explained where they stand and again in a glossary. docs/glossary.md has the same sentences."""

from html import escape

TERMS = {
    "operating point": (
        "A named rule: a threshold and a calibrator an exit, and where to abstain. `full` runs the whole network "
        "for every row."
    ),
    "full model": "The network run to its last exit; accuracy drops and FLOPs fractions are measured against it.",
    "exit": "A classifier after a block. Exits are numbered from 0, shallow to deep; the last one always answers.",
    "accuracy": "The share of rows whose answer is their label; abstentions count as well, since they have an answer.",
    "accuracy drop": (
        "The full model's accuracy minus the point's, on the same rows. Below 0 the point is right more often."
    ),
    "FLOPs of full": "What is spent, as a share of what running every row to the last exit costs.",
    "milliseconds": (
        "Mean time of one row by itself, from times of every graph on the machine that is named; a row in a batch "
        "takes less. Its interval is of which rows come, not of the clock."
    ),
    "coverage": "The share of rows that are answered without the flag of an abstention.",
    "selective risk": "The share of errors among the answered rows.",
    "abstention": (
        'An answer that carries the flag "don\'t rely on it", because its calibrated log-odds are below '
        "`abstain_below`. The label is still given."
    ),
    "threshold": "A score from which on rows leave at an exit. +inf switches the exit off; the last exit's is −inf.",
    "score": (
        "The number that exits are decided on: log(c / (1 − c)) of the label's probability c, computed from the "
        "logits. It keeps the order of rows where a rounded probability doesn't."
    ),
    "confidence": (
        "The probability that the label is right: the exit's calibrator applied to the score, or to what else it needs."
    ),
    "95% interval": "Of all samples of so many rows, at least 95% give an interval that holds the true value.",
    "promise": (
        "A statement that holds with probability 1 − δ over the certify rows. Each holds by itself with its own δ."
    ),
    "estimate": "A target that was kept on the rows it was chosen on, with errors in hand, and tested on none since.",
    "δ": "The probability, over the certify rows, with which a promise may be made and not hold: at most this.",
    "bound": "The upper confidence limit, from the certify rows, of what is promised to stay below a target.",
    "held": (
        "What the test rows show of a target: yes where their whole 95% interval is within it, no where all of it "
        "is beyond, not shown otherwise."
    ),
    "rules tried": (
        "How many rules were tested on the certify rows before one was taken; the tests share δ out, or stop at "
        "the first rule that fails."
    ),
    "oracle": "Every row leaves at its first exit that is right. No rule is better; none can know it.",
    "frontier": "The rules that no other one beats in both cost and accuracy on the rows that rules are chosen from.",
    "calibrator": "A map from an exit's output to probabilities, fitted on labelled rows.",
    "fit, select, certify, test": (
        "The four parts of the labelled rows. Rules and calibrators come from fit and select, promises from "
        "certify alone, figures from test alone."
    ),
    "reliability": "Accuracy against confidence: a calibrated point's curve is the diagonal.",
    "ECE": "Expected calibration error: mean |confidence − accuracy| over bins.",
    "MCS": "Signed miscalibration: + is over-confident. cwMCS is one value a class, wsMCS weighs classes by size.",
    "ConfCE^corr": (
        "The corrected confidence error; nobody lowers it by reporting other than what is believed. Calibrators "
        "are chosen by it."
    ),
    "LinCE^cw": "The truthful linear calibration error, and its mean over classes.",
    "EEFP": (
        "Early-exit failure prediction: is an exit confident where it is right, or where nobody deeper would be "
        "right either?"
    ),
    "AURC": (
        "Areas under the risk–coverage curve: of the selective risk, of the generalised risk, and above a perfect "
        "ranking's."
    ),
    "AUROC_f": "The probability that a right row scores above a wrong one.",
    "confident mistake": "A wrong answer of high confidence on a test row. The model is mistaken, or the label is.",
    "carried state": "The tensors that a block hands on to later ones, besides the model's inputs.",
    "segment": "A run of blocks merged into one graph that keeps only its last exit's head.",
    "cascade graph": (
        "All blocks, gates and compactions nested in one ONNX graph, so that a row pays for one call of ONNX Runtime "
        "and not for one a block."
    ),
    "matched gap": (
        "A difference in accuracy between rows of nearly equal confidence that differ in a routing feature."
    ),
    "shift": "Data from a world that has moved: another source, or rows of classes that the model doesn't know.",
}
# Headings that stand for a term.
_ALSO = {
    "point": "operating point",
    "drop": "accuracy drop",
    "AUGRC": "AURC",
    "wsMCS": "MCS",
    "n·ConfCE^corr": "ConfCE^corr",
    "n·LinCE^cw": "LinCE^cw",
    "answered": "coverage",
    "error among answered": "selective risk",
    "abstained": "abstention",
    "within": "held",
}


class Terms:
    """The terms that a page has used, each with an explanation that a mouse, a finger or the Tab key opens.

    A popover needs no script and isn't cut off by a table that scrolls.
    """

    def __init__(self, cost: str = "FLOPs") -> None:
        """cost: what FLOPs are called where the costs are other ones."""
        self._cost, self._used = cost, dict[str, str]()

    def of(self, shown: str, term: str = "") -> str:
        """Text (plain), as a term if it is one."""
        name = term or shown
        name = _ALSO.get(name, name)
        if name not in TERMS:
            return escape(shown)
        place = self._used.setdefault(name, f"term-{len(self._used)}")
        return (
            f"<button type='button' class='term' popovertarget='{place}' title=\"{self._text(name)}\">"
            f"{escape(shown)}</button>"
        )

    def explained(self) -> str:
        """What the terms open. To be put once, behind all that uses them."""
        return "".join(
            f"<div popover id='{place}'><b>{self._name(name)}</b>: {self._text(name)}</div>"
            for name, place in self._used.items()
        )

    def glossary(self) -> str:
        """The used terms as a list, in alphabetical order."""
        lines = sorted(self._used, key=str.casefold)
        return (
            "<dl class='glossary'>"
            + "".join(f"<div><dt>{self._name(name)}</dt><dd>{self._text(name)}</dd></div>" for name in lines)
            + "</dl>"
        )

    def _name(self, name: str) -> str:
        return escape(name.replace("FLOPs", self._cost))

    def _text(self, name: str) -> str:
        return escape(TERMS[name].replace("FLOPs", self._cost))
