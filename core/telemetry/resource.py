"""Who a process is, for a collector."""

import os
import socket
from importlib import metadata

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from core.messages import WorkerRef
from core.telemetry.names import Role

_DISTRIBUTION = "tandem-llm"
_NAMESPACE = "tandem"


def version() -> str:
    """Of this software."""
    return metadata.version(_DISTRIBUTION)


def resource_of(role: Role, me: WorkerRef) -> Resource:
    """Each role is a service, each process an instance of it.

    OTEL_SERVICE_NAME is the cluster's name: the role is put behind it. Of OTEL_RESOURCE_ATTRIBUTES
    the rest is taken as it is.
    """
    given = OTELResourceDetector().detect().attributes
    cluster = os.environ.get("OTEL_SERVICE_NAME") or given.get("service.name") or _NAMESPACE
    return Resource.create(
        {
            "host.name": given.get("host.name", socket.gethostname()),
            "service.namespace": given.get("service.namespace", cluster),
            "service.name": f"{cluster}-{role}",
            "service.instance.id": str(me),
            "service.version": version(),
        }
    )
