"""assert_*: pure functions of what a run gave back and the right answer. Each returns None or raises Violation.

A module is called as the chapter whose laws it judges. A check that needs something the run did not record raises
UsageError, not Violation.
"""
