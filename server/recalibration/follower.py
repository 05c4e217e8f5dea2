"""What an engine does about labels beside answering: it follows what was decided, and the leader decides."""

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from offramp.runtime.errors import OfframpError
from offramp.runtime.execution.cpu.memory import give_back_large
from offramp.runtime.online import gauges
from offramp.runtime.online.contest import promised_risk
from offramp.runtime.online.gauges import Gauges
from offramp.runtime.online.learning import Learning
from offramp.runtime.online.watch import Watch
from offramp.runtime.online.window import Window
from offramp.server.recalibration.keeping import Keeping
from offramp.server.recalibration.risk_metrics import RiskMetrics

_EVERY = 1.0  # seconds between two looks at what was decided
_MEASURED_EVERY = (5.0, 60.0)  # seconds between two readings of the window, at least and at most
_SHARE = 0.003  # of the time that reading it and all that follows may take
_log = logging.getLogger("offramp.online")


class Follower:
    """One engine's. figures: the newest by operating point, {} on one that doesn't lead. failing: why the last look
    came to nothing, None when it didn't."""

    def __init__(self, learning: Learning, keeping: Keeping, metrics: RiskMetrics) -> None:
        self._learning, self._keeping, self._metrics = learning, keeping, metrics
        self._due = 0.0
        self._watches: dict[str, Watch] = {}
        self.leads = False
        self.failing: str | None = None
        self.figures: dict[str, Gauges] = {}

    async def run(self) -> None:
        """Until it is cancelled. Whatever goes wrong is logged, and tried again.

        One thread looks. What a window takes for a moment the C library keeps for the thread that had it: among any of
        the loop's threads each would come to have its own.
        """
        give_back_large()
        thread = ThreadPoolExecutor(1, thread_name_prefix="offramp-follower")
        try:
            await self._follow(thread)
        finally:
            thread.shutdown(wait=False)

    async def _follow(self, thread: ThreadPoolExecutor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            said = self.failing
            try:
                await loop.run_in_executor(thread, self.look)
                self.failing = None
            except OfframpError as error:
                self.failing = str(error)
                if said != self.failing:  # once a second it would fill the log
                    _log.warning("recalibration was put off: %s", self.failing)
            except Exception as error:
                self.failing = repr(error)
                if said != self.failing:
                    _log.exception("recalibration was put off")
            await asyncio.sleep(_EVERY)

    def look(self, *, measure: bool = False) -> None:
        """Follow what was decided; who leads reads the window when it is time for that. measure: now, in any case.

        Raises StoreError.
        """
        learning = self._learning
        failing = learning.alarm is not None or self.failing is not None
        self._metrics.kept(learning, self._keeping.completed, failing=failing)
        learning.follow()
        led, self.leads = self.leads, learning.lead()
        if not self.leads:
            if led:
                self.figures, self._watches = {}, {}
                self._metrics.hide()
            return
        started = time.monotonic()
        if measure or started >= self._due:
            for name in list(learning.calibration.points):
                self._measure(name)
            ended = time.monotonic()
            least, most = _MEASURED_EVERY
            self._due = ended + min(max(least, (ended - started) / _SHARE), most)

    def _measure(self, name: str) -> None:
        """Look at an operating point's newest rows."""
        learning = self._learning
        window = learning.window(name)
        if not len(window):
            return
        self._metrics.decided(found.kind for found in learning.look_at(name, window) if found.decided)
        point = learning.calibration.point(name)
        figures = self.figures[name] = gauges.measure(window, point, version=learning.version)
        self._metrics.show(name, figures, promised_risk(point), self._drifted(name, window))

    def _drifted(self, name: str, window: Window) -> list[str]:
        """What has left its limits since the version in force began, or since this engine leads."""
        version = self._learning.version
        watch = self._watches.get(name)
        if watch is None or watch.version != version:
            risk = promised_risk(self._learning.calibration.point(name))
            watch = self._watches[name] = Watch(version, risk=risk)
        for signal in watch.look(window):
            _log.warning("drift at operating point %s, version %d: %s", name, version, signal)
        return list(watch.standing)

    def describe(self) -> dict[str, Any]:
        """The newest figures by operating point, as JSON has them."""
        return {
            name: {
                **asdict(figures),
                "promised_risk": promised_risk(self._learning.calibration.point(name)),
                "drifted": list(watch.standing) if (watch := self._watches.get(name)) else [],
            }
            for name, figures in list(self.figures.items())
        }
