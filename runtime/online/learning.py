"""One bundle's rows and labels, and the calibration that they have led to: what a cascade and a server hold on to."""

import datetime
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from offramp.runtime.bundle import Manifest, own_version
from offramp.runtime.calibration_file import Calibration, decode_calibration, encode_calibration
from offramp.runtime.errors import InputError, StoreError
from offramp.runtime.online.contest import ORIGIN, Contest, Found, fitted_on
from offramp.runtime.online.gauges import Gauges, measure
from offramp.runtime.online.leaving import Aim, Hold, rederive
from offramp.runtime.online.names import new_name
from offramp.runtime.online.online import Online
from offramp.runtime.online.shadow import Shadow, ShadowRuns, Waiting, rows_of
from offramp.runtime.online.trials import turns_of
from offramp.runtime.online.window import Window
from offramp.runtime.points import OperatingPoint
from offramp.runtime.predictions import Predictions, Records, Said, Seen

if TYPE_CHECKING:  # the store needs the extra `online`
    from offramp.runtime.online.store.control import Decision, Lease, State, Version
    from offramp.runtime.online.store.labelling import Outcome

_log = logging.getLogger("offramp.online")
_LEASE = 15.0  # seconds that an engine leads without a sign of life
_SEPARATOR = "/"
_LOG = 10_000  # decisions that a restart reads


class Learning:
    """What was served and what came of it. Any number of threads may use it.

    calibration: in force, the bundle's own or one made online. version: its number here, 0 for the bundle's own.
    """

    def __init__(self, online: Online, manifest: Manifest, calibration: Calibration) -> None:
        """calibration: the bundle's own. Raises StoreError, InputError, RuntimeUnavailable without the extra."""
        from offramp.runtime.online.store.lot import Lot
        from offramp.runtime.online.store.store import Store

        self._lot = Lot
        self._online, self._manifest, self._own = online, manifest, calibration
        self._store = Store.open(
            online.where,
            model=manifest.name,
            bundle=manifest.digest,
            exits=len(manifest.exits),
            classes=manifest.classes,
            limits=online.limits,
        )
        self.shadow, self._runs = Shadow(online.shadow), ShadowRuns(self._store.complete)
        self._contests: dict[str, Contest] = {}
        self._looking = Lock()
        self._leading = f"recalibrate {manifest.name}"
        self._lease: Lease | None = None
        self._renew = 0.0  # on the monotonic clock, when it has to be renewed
        self._led = 0  # the token of the newest lease that was held here
        self._new_labels = 0
        self.in_force = (0, calibration)
        self._begin()

    @property
    def calibration(self) -> Calibration:
        return self.in_force[1]

    @property
    def version(self) -> int:
        return self.in_force[0]

    @property
    def method(self) -> str:
        """By which candidates are fitted."""
        return self._online.recalibrator.method

    @property
    def alarm(self) -> str | None:
        """Why nothing can be kept at present; None when all is well."""
        return self._store.alarm

    @property
    def kept(self) -> int:
        """Rows kept since this began."""
        return self._store.counts.kept

    @property
    def durable(self) -> bool:
        """Whether what is kept is on the disk when `keep_as` returns, which waits for it."""
        return self._online.limits.durable

    @property
    def room(self) -> int:
        """Rows that find a place now; those that wait for the disk leave it within seconds."""
        return self._store.room

    @property
    def dropped(self) -> int:
        """Rows that found no place since this began."""
        return self._store.dropped

    def close(self) -> None:
        """Write what waits, and let go of the store. Rows that wait for a shadow run are dropped."""
        self._runs.close()
        with self._looking, suppress(StoreError):
            if self._lease is not None:
                self._store.release(self._lease)  # or nobody could lead until it ends
                self._lease = None
        self._store.close()

    # ------------------------------------------------------------ rows and labels

    def keep(
        self,
        version: int,
        point: str,
        out: Predictions,
        seen: Said,
        inputs: Mapping[str, NDArray[Any]],
        record: Callable[[Mapping[str, NDArray[Any]]], Records],
        *,
        cut: bool = False,
    ) -> NDArray[Any]:
        """Keep answered rows under a name of their own; (N,) their ids. Waits as `keep_as`.

        What has no label gets an id and isn't kept, nor is any row of a call that was cut short: those of them that
        would have left there anyway say nothing of the others. inputs: theirs, checked. record: runs some through all
        exits, later, if they are drawn for it. cut: whether rows had to leave at an exit, if they hadn't by themselves.
        """
        request = new_name()
        cut = cut or bool(out.involuntary.any())
        rows = np.flatnonzero((out.label >= 0) & (not cut))
        if len(rows):
            part = seen if len(rows) == len(out) else seen.apart().part(rows)
            unfinished = part.unfinished
            row_bytes = sum(a.nbytes for a in inputs.values()) / len(out)
            chance = self.shadow.chance(int(unfinished.sum()), self._runs.room(row_bytes))
            drawn = rows[self.shadow.draw(unfinished, chance)]
            self.keep_as([(request, rows)], version, point, out.exit[rows], out.abstain[rows], part, chance)
            if len(drawn):
                axes = {one.name: one.batch_axis for one in self._manifest.inputs}
                names = [(request, row) for row in drawn.tolist()]
                self._runs.put(Waiting(names, rows_of(inputs, axes, drawn), axes, record))
        return np.array([f"{request}{_SEPARATOR}{k}" for k in range(len(out))], dtype=object)

    def keep_as(
        self,
        of: Sequence[tuple[str, NDArray[np.int64]]],
        version: int,
        point: str,
        exit: NDArray[np.int32],
        abstain: NDArray[np.bool_],
        seen: Said,
        shadow: float = 0.0,
    ) -> None:
        """Keep N answered rows, each by a request and its number there. Never waits, unless it is to be durable.

        of: requests, and which of each one's rows. version: under which they were answered. exit, abstain, seen: of all
        of them, in that order. shadow: the probability with which a row that lacks any exit's say is run to the end
        afterwards.
        """
        self._store.append(self._lot(of, time.time(), version, point, exit, abstain, seen, shadow))

    def feedback(
        self, ids: Sequence[str], labels: ArrayLike, key: str | None = None, asked: ArrayLike | None = None
    ) -> "list[Outcome]":
        """Give rows their labels, by number or class name; what became of each.

        ids: as predictions have them. key: whoever sends them. asked: the probability with which each label was sought,
        where that depends on the row. Every so many labels it is looked whether they call for another calibration (see
        `look`), in the caller's thread. Raises InputError, StoreError.
        """
        if isinstance(ids, str) or not isinstance(ids, Iterable):
            raise InputError(f"ids is {ids!r:.40}, expected a list of Predictions.ids.")
        names = [_name(id, at) for at, id in enumerate(ids)]
        outcomes = self.label([name for name, _ in names], [row for _, row in names], labels, key, asked)
        self._new_labels += sum(outcome == "accepted" for outcome in outcomes)
        if self._new_labels >= self._online.every:
            try:
                self.look()
            except StoreError as error:  # the labels are kept, and the next ones are another occasion
                _log.warning("recalibration was put off: %s", error)
        return outcomes

    def label(
        self,
        requests: Sequence[str],
        rows: Sequence[int],
        labels: ArrayLike,
        key: str | None = None,
        asked: ArrayLike | None = None,
    ) -> "list[Outcome]":
        """Give rows their labels, and no more; as `Store.feedback`."""
        return self._store.feedback(requests, rows, labels, key, asked)

    def complete(self, requests: Sequence[str], rows: Sequence[int], seen: Seen) -> None:
        """Add what exits say of rows that were run to the end after their answer. Waits as `keep_as`."""
        self._store.complete(requests, rows, seen.score, seen.logits)

    def flush(self) -> None:
        """Return when all that was kept is on the disk. Raises StoreError."""
        self._store.flush()

    def delete(self, ids: Sequence[str]) -> int:
        """Forget these rows' whole requests; how many rows that were."""
        return self.forget(sorted({_name(id, at)[0] for at, id in enumerate(ids)}))

    def forget(self, requests: Sequence[str]) -> int:
        """Forget all rows of these requests; how many that were."""
        return self._store.delete(requests)

    def settle(self, seconds: float = 60.0) -> bool:
        """Wait until the rows drawn for shadow runs were run and everything is written; False if that takes longer.

        For programs that look at once at what they have just answered; serving needs no such thing. Raises StoreError.
        """
        done = self._runs.wait(seconds)
        self._store.flush()
        return done

    def gauges(self, point: str) -> Gauges:
        """The figures of an operating point's newest rows. Raises InputError, StoreError."""
        chosen = self.calibration.point(point)
        return measure(self.window(point), chosen, version=self.version)

    # ------------------------------------------------------------ looking

    def lead(self) -> bool:
        """Lead, or go on leading, for a quarter of a minute; False while another engine does. Raises StoreError."""
        with self._looking:
            # Each renewal is a flush to the disk; the token tells in any case whether a decision is still ours.
            if self._lease is None or time.monotonic() >= self._renew:
                asked = time.monotonic()
                self._lease = self._store.lease(self._leading, self._store.engine, _LEASE)
                self._renew = asked + _LEASE / 3
            return self._lease is not None

    def look(self) -> list[Found]:
        """Try what the labels so far say, and act on it as the mode says. One engine of several does.

        Returns what was found at each operating point whose candidates were judged. Raises StoreError.
        """
        self._new_labels = 0
        return [found for name in self.calibration.points for found in self.look_at(name, self.window(name))]

    def look_at(self, name: str, window: Window) -> list[Found]:
        """As `look`, at one operating point. window: its newest rows."""
        with self._looking:
            lease = self._lease = self._store.lease(self._leading, self._store.engine, _LEASE)
            if lease is not None and lease.token != self._led:
                self._contests.clear()  # another led meanwhile: what its candidates spent is in the log
                self._led = lease.token
            state = self.follow()
            if lease is None or state.frozen or state.mode == "off":
                return []
            contest = self._contest(name)
            found = contest.look(window)
            for one in found:
                if one.decided:
                    self._act(contest, one, lease, state.mode)
                if one.kind == "accept":
                    break  # the others were judged against an incumbent that may be none any more
            return found

    def rederive(self, point: str, hold: Hold = "shares", *, by: str) -> Found:
        """New exit thresholds from rows that shadow runs have made complete: a version that a person may promote.

        hold: what calibration had given the point and is to be so again, see `leaving.Aim`. by: who asks. Whatever
        comes of it is logged; where it is "propose", numbers["version"] is the version. Nothing is put in force.
        Raises InputError where calibration gave nothing of the kind or there are too few rows, StoreError.
        """
        from offramp.runtime.online.store.control import Draft

        with self._looking:
            self.follow()
            incumbent = self.calibration.point(point)
            given = self._own.points.get(point, incumbent)
            contest = self._contest(point)
            aim = Aim.of(hold, given, contest.selections + 1)
            rows = self._store.window(point=point, limit=self._online.rows, complete=True)
            flops = self._manifest.exit_flops(self._manifest.typical_sizes)
            found = rederive(rows, incumbent, flops, aim)
            contest.selections = aim.turn
            numbers = {**found.numbers, "selections": aim.turn}
            if found.kind != "propose":
                self._store.decide(found.kind, numbers, by=by)
                return found
            document = self._encoded(self._with(found.point))
            self._store.decide("propose", numbers, by=by, draft=Draft(f"thresholds, {hold}", document, in_force=False))
            made = next(one.version for one in reversed(self._store.versions()) if one.document == document)
            return replace(found, numbers={**numbers, "version": made})

    def _act(self, contest: Contest, found: Found, lease: "Lease", mode: str) -> None:
        """Log a verdict, and do what the mode says."""
        from offramp.runtime.online.store.control import Draft

        if found.kind != "accept":
            self._store.decide(found.kind, found.numbers, by=lease)
        elif mode == "observe":
            self._store.decide("would accept", found.numbers, by=lease)
        else:
            draft = Draft(
                self._online.recalibrator.method, self._encoded(self._with(found.point)), in_force=mode == "automatic"
            )
            self._store.decide("accept" if draft.in_force else "propose", found.numbers, by=lease, draft=draft)
        contest.end(found)
        self.follow()  # what has just been put in force is the next point's calibration, too

    def _with(self, point: OperatingPoint) -> Calibration:
        now = self.calibration
        provenance = {**now.provenance, ORIGIN: {"base": self._base}}
        return replace(now, points={**now.points, point.name: point}, provenance=provenance)

    # ------------------------------------------------------------ what is in force

    def follow(self) -> "State":
        """Serve what the newest decision says, whoever made it; what that is. Raises StoreError."""
        state = self._store.state()
        version = state.calibration
        if version != self.version:
            self.in_force = version, self._own if version == 0 else self._decoded(version)
            self._contests.clear()  # each has another incumbent now
        return state

    def state(self) -> "State":
        """What is in force, and how far it may change by itself."""
        return self._store.state()

    def versions(self) -> "list[Version]":
        """All calibrations that were made online, oldest first."""
        return self._store.versions()

    def decisions(self, limit: int = 100) -> "list[Decision]":
        """The newest decisions with their numbers, the oldest of them first."""
        return self._store.decisions(limit)

    def promote(self, version: int, *, by: str) -> None:
        """Put a version in force; 0 is the bundle's own. by: the person who says so. Raises InputError, StoreError."""
        if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < 2**31:
            raise InputError(f"version is {version!r:.40}, expected the number of one of `versions()`, or 0.")
        self._store.decide("promote", {"version": version}, by=by, calibration=version)
        with self._looking:
            self.follow()

    def rollback(self, *, by: str) -> int:
        """Put in force what was before the version that is now; its number. Raises InputError, StoreError."""
        now = self._store.state()
        parents = {one.version: one.parent for one in self._store.versions()}
        if now.calibration == 0:
            raise InputError("the bundle's own calibration is in force: there is none before it.")
        parent = parents[now.calibration]
        self._store.decide("rollback", {"version": parent}, by=by, revision=now.revision, calibration=parent)
        with self._looking:
            self.follow()
        return parent

    def freeze(self, frozen: bool = True, *, by: str) -> None:
        """Whether nothing may change by itself. Raises InputError, StoreError."""
        if not isinstance(frozen, bool):
            raise InputError(f"frozen is {frozen!r:.40}, expected True or False.")
        self._store.decide("freeze" if frozen else "unfreeze", {}, by=by, frozen=frozen)

    def _begin(self) -> None:
        """Take up what the store says, as far as it is about this bundle and its calibration."""
        state, mode = self._store.state(), self._online.mode
        changes: dict[str, Any] = {}
        if state.bundle != self._manifest.digest:
            changes = {"bundle": self._manifest.digest, "calibration": 0}
        elif state.calibration and self._base_of(self._decoded(state.calibration)) != self._base:
            changes = {"calibration": 0}  # the offline job has made another since
        if mode is not None and mode != state.mode:
            changes["mode"] = mode
        if changes:
            self._store.decide("begin", {"base": self._base}, by=self._store.engine, **changes)
        self.follow()

    @property
    def _base(self) -> str:
        """The bundle's own calibration, in a word."""
        return f"{self._own.version} of {self._own.created}"

    @staticmethod
    def _base_of(calibration: Calibration) -> Any:
        return calibration.provenance.get(ORIGIN, {}).get("base")

    def _encoded(self, calibration: Calibration) -> str:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        made = encode_calibration(
            calibration, self._manifest.digest, created=now, producer=f"offramp {own_version()}, online"
        )
        return made.decode()

    def _decoded(self, version: int) -> Calibration:
        document = next(one.document for one in self._store.versions() if one.version == version)
        return decode_calibration(document.encode(), Path(f"{self._online.where}: version {version}"))

    # ------------------------------------------------------------ contests

    def _contest(self, name: str) -> Contest:
        """A point's candidates. All points' are made together, for what the log says of them is read once."""
        if name not in self._contests:
            past = [one.numbers for one in self._store.decisions(_LOG)]
            self._contests = {point: self._opened(point, past) for point in self.calibration.points}
        return self._contests[name]

    def _opened(self, name: str, log: Sequence[Mapping[str, Any]]) -> Contest:
        """What the log says of earlier candidates counts, so that a restart spends nothing twice."""
        incumbent = self.calibration.point(name)
        past = [numbers for numbers in log if numbers.get("point") == name]
        same = [numbers for numbers in past if numbers.get("incumbent") == fitted_on(incumbent)]
        return Contest(
            self._online,
            incumbent,
            before=self._before(incumbent),
            turns=turns_of(same),
            selections=max((one.get("selections", 0) for one in past), default=0),
        )

    def _before(self, incumbent: OperatingPoint) -> OperatingPoint | None:
        """Whose place a point that was made online has taken."""
        parents = {one.version: one.parent for one in self._store.versions()}
        version = self.version
        while version and fitted_on(incumbent) is not None:
            version = parents[version]
            point = (self._own if version == 0 else self._decoded(version)).point(incumbent.name)
            if fitted_on(point) != fitted_on(incumbent):
                return point
        return None

    def window(self, point: str) -> Window:
        """An operating point's newest rows, oldest first. Raises StoreError."""
        return self._store.window(point=point, limit=self._online.rows)


def _name(id: str, at: int) -> tuple[str, int]:
    request, found, row = id.rpartition(_SEPARATOR) if isinstance(id, str) else ("", "", "")
    if not found or not row.isdecimal():
        raise InputError(f"ids[{at}] is {id!r:.80}, expected one of Predictions.ids.")
    return request, int(row)
