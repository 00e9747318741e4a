"""Dovetail's part of a server's workers that handles weights. vLLM gets it as `--worker-extension-cls`."""

from __future__ import annotations

import json
import logging
from typing import Any

from dovetail.protocol.errors import error_text
from dovetail.protocol.messages import SendOn
from dovetail.rollout.compat import give_update_up

# vLLM configures loggers below this name only.
logger = logging.getLogger("vllm.dovetail.weights")

WEIGHTS_WORKER = "dovetail.rollout.serving.weights_worker.WeightsWorker"
SENDING_WORKER = "dovetail.rollout.serving.weights_worker.SendingWorker"


class WeightsWorker:
    """vLLM adds it to the bases of its worker. Its methods answer `collective_rpc`."""

    def guarded(self, method: str, arguments: str) -> str | None:
        """Call a method of this worker with keyword arguments (JSON). Returns its error, or None.

        If a worker raises an error, vLLM does not read the answers of the workers after it. It would take these for
        the answers to its next calls."""
        try:
            getattr(self, method)(**json.loads(arguments))
        except Exception as error:
            logger.exception("%s failed", method)
            return error_text(error)
        return None

    def begin_weight_update(self) -> None:
        """Begin an update of the weights. One that was not finished is given up, because the coordinator that began it
        may have died, or may have stopped waiting."""
        give_update_up(self)
        self.start_weight_update()  # type: ignore[attr-defined]


class SendingWorker(WeightsWorker):
    """The worker of a server that keeps the weights that it receives, and sends them to other servers."""

    def send_weights_on(self, request: str) -> str | None:
        """The answer to a `SendOn`, both as JSON. See `DovetailWeightTransferEngine.send_on`."""
        engine: Any = self.weight_transfer_engine  # type: ignore[attr-defined]
        answer = engine.send_on(SendOn.model_validate_json(request))
        return None if answer is None else json.dumps(answer)
