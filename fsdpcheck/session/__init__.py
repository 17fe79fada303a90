"""A session: a plan, the queue of checks, the processes that work on it, and the ledger of verdicts."""
