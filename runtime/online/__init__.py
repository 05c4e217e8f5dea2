"""What a served cascade learns from labels that come later: recalibration that is guarded, and risk as it is now.

window: served rows and what is known of them. fitting: new calibrators from a window, and abstention. leaving: new
exit thresholds. guard: whether a candidate may take over; trials: candidates tried side by side. shadow: rows that
are run to the end after they were answered. names: of requests. bound: how large the risk of the answered rows can
be. gauges: all figures over a window. alarms: drift, seen while it happens; watch: over a running store, where labels
come late. betting: the sequential test that guard, bound and alarms share.
"""
