"""An elastic worker that begins as a prefill worker: `python -m deploy.elastic.prefill`."""

from core.messages import WorkerRole
from deploy.elastic.worker import run

if __name__ == "__main__":
    run(WorkerRole.PREFILL)
