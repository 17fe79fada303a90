"""Whether an adapter has what its promises need (``vocabulary.PROMISES``); who has it not breaks the protocol.

Otherwise the missing method would be called, raise, and be taken for a finding.
"""

from __future__ import annotations

from typing import get_args

from fsdpcheck.adapters.contract import Adapter, Features
from fsdpcheck.adapters.vocabulary import PROMISES
from fsdpcheck.case import Dtype
from fsdpcheck.errors import AdapterError, explain

_RULE = "declares a rule"


def require_consistent(ref: str, adapter: Adapter) -> None:
    """Raise AdapterError where promises contradict each other, the rules declared, or the methods an adapter has."""
    for promise in sorted(adapter.features.promises):
        needs = PROMISES[promise]
        lacking = [name for name in needs.adapter if not callable(getattr(adapter, name, None))]
        if lacking:
            got = f"{type(adapter).__name__} without {', '.join(lacking)}"
            raise _refusal(ref, promise, got, f"methods {', '.join(needs.adapter)}", "add them (see fsdpcheck.adapter)")
        missing = sorted(set(needs.promises) - adapter.features.promises)
        if missing:
            got = f"promises without {', '.join(missing)}, on which its laws train"
            raise _refusal(ref, promise, got, f"{', '.join(missing)} as well", "promise it too")
    if "exact-factors" in adapter.features.promises and adapter.features.factor.nested:
        got = "Features.factor with nested=True: factors that carry the rounding of a norm of norms"
        raise _refusal(ref, "exact-factors", got, "factors of the root of one squared norm", "declare nested=False")
    _require_rules(ref, adapter.features)


def _require_rules(ref: str, features: Features) -> None:
    """Raise AdapterError where the rules declared contradict each other."""
    for name, rule in (("factor", features.factor), ("global_norm", features.global_norm)):
        if rule.nested and rule.norm.eps:
            got = f"Features.{name} with nested=True and NormRule(eps={rule.norm.eps}): no one root that it is added at"
            raise _contradiction(ref, _RULE, got, "nested=False, or no eps", "declare one of the two")
    dtypes, accepted = features.arithmetic.dtypes, "float32" in features.accepts
    if not dtypes or not set(dtypes) <= {*get_args(Dtype)} or (dtypes == ("float32",) and not accepted):
        got = f"Features.arithmetic.dtypes = {dtypes!r}{'' if accepted else ' without the trait float32'}"
        wanted = 'one of "float64" and "float32" at least, float32 alone with the trait "float32"'
        raise _contradiction(ref, _RULE, got, wanted, "add what is missing")
    if "float32" not in dtypes and accepted:
        got = f'the trait "float32", and Features.arithmetic.dtypes = {dtypes!r}'
        raise _contradiction(ref, _RULE, got, "both or neither", 'add "float32", or take the trait away')
    if features.arithmetic.averaging == "none" and "mean" in features.accepts:
        got = 'the trait "mean", local means that are averaged, and ArithmeticRule(averaging="none")'
        raise _contradiction(ref, _RULE, got, "one of the two", "take the trait away")


def _refusal(ref: str, promise: str, got: str, wanted: str, then: str) -> AdapterError:
    return _contradiction(ref, f"promises {promise!r}", got, wanted, f"{then}, or take the promise away")


def _contradiction(ref: str, said: str, got: str, wanted: str, then: str) -> AdapterError:
    return AdapterError(explain(f"adapter {ref!r} {said}, which it contradicts", got=got, wanted=wanted, then=then))
