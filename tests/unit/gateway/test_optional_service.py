"""A service whose package is missing is a clear mistake of the operator's, not a traceback."""

import sys
from types import SimpleNamespace

import pytest

from core.config import ClusterConfig, GatewayConfig
from core.errors import ConfigError
from gateway.__main__ import _services
from gateway.readiness import Readiness

PACKAGE = "smg_grpc_proto"


def services(api, card, **gateway):
    context = SimpleNamespace(config=ClusterConfig(gateway=GatewayConfig(**gateway)), card=card)
    return [service.name for service in _services(api, context, Readiness())]


def test_the_routers_protocol_is_served_only_where_it_is_asked_for(api, card):
    own = "tandem.v1.InferenceService"
    assert services(api, card) == [own]
    assert services(api, card, vllm_engine=True) == [own, "vllm.grpc.engine.VllmEngine"]


def test_without_its_package_the_extra_is_named(api, card, monkeypatch):
    for name in list(sys.modules):
        if name.startswith((PACKAGE, "gateway.vllm")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(ConfigError, match="install the extra `smg`"):
        services(api, card, vllm_engine=True)
