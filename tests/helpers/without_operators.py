"""torch.compile as it is before cupyattn.integrations.torch is imported, for tests that share a
process with some that import it."""

from __future__ import annotations

import sys
from typing import Any

import pytest


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the end of the test Dynamo knows no substitutes of our calls."""
    module: Any = sys.modules.get("cupyattn.integrations.torch")
    if module is None:
        return
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import PolyfilledFunctionVariable
    from torch._dynamo.variables.builder import VariableBuilder

    handlers = PolyfilledFunctionVariable._get_polyfill_handlers()
    ours = [f for f in handlers if (getattr(f, "__module__", None) or "").startswith("cupyattn")]
    rules, dispatch = trace_rules.get_torch_obj_rule_map(), VariableBuilder._id_dispatch()
    ids = trace_rules._polyfilled_function_ids
    monkeypatch.setattr(ids, "function_ids", ids() - {id(f) for f in ours})
    for function in ours:
        for known, key in ((handlers, function), (rules, function), (dispatch, id(function))):
            monkeypatch.delitem(known, key, raising=False)
    for call in module.CALLS:
        if call.owner is not None:
            monkeypatch.setattr(call.owner, "run", call.function)
