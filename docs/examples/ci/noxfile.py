"""`nox -s fsdpcheck`: the gate in an environment of its own; what follows `--` are options of it."""

import nox


@nox.session
def fsdpcheck(session: nox.Session) -> None:
    session.install("torch", "fsdpcheck", ".")
    session.run("fsdpcheck", "gate", *session.posargs)
