"""What allows the models of payload reuse one condition of fairness for all fair actions: every behaviour ends."""

from __future__ import annotations

import pytest

from quiesce.model import tlc
from quiesce.model.config import Config
from quiesce.model.manifest import SMALL, load

MANIFEST = load()
MODELS = [m.name for m in MANIFEST.models.values() if m.protocol == "payload_reuse" and m.size == SMALL]


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_every_behaviour_ends_without_any_fairness(name: str) -> None:
    model = MANIFEST.models[name]
    plain = MANIFEST.config(model).without(("specification", "invariant", "property"))
    config = Config.parse(f"{plain.text()}\nSPECIFICATION UnfairSpec\nPROPERTY EndsAnyway\n")
    module = MANIFEST.directory / f"{model.module}.tla"
    result = tlc.run(module, config, libraries=MANIFEST.libraries, coverage=False, short=True, timeout=120.0)
    assert result.holds, result.message
    assert result.distinct == model.distinct
