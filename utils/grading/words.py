"""Words that the course's own messages contain, and by which grading understands them."""

#: `utils.cluster` says this when no later cell can work.
NEEDS_FRESH_RANKS = "ranks.restart()"
#: Begins the advice in a report of a deadlock.
ADVICE = "What to try"
