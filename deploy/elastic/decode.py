"""An elastic worker that begins as a decode worker: `python -m deploy.elastic.decode`."""

from core.messages import WorkerRole
from deploy.elastic.worker import run

if __name__ == "__main__":
    run(WorkerRole.DECODE)
