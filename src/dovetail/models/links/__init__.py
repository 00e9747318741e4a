"""How the bytes of a weight transfer reach a receiver: CUDA IPC, NCCL or Gloo (`dovetail.models.transfer.Channel`)."""
