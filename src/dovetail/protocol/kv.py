"""The messages about the KV cache of a migrating sample: the abilities of a rollout, and the parameters of requests."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.protocol.messages import Message

# Keys of vLLM's kv_transfer_params.
HOLD, PULL = "dovetail_hold", "dovetail_pull"
# A server keeps the blocks of an aborted request so long for the server that takes the request over.
HOLD_SECONDS = 30.0


class KVAbility(Message):
    """`Register.abilities["kv"]`: this rollout can hand a sample's KV cache to another rollout with the same layout."""

    transport: Literal["tcp", "nixl"]
    host: str = ""
    ports: list[int] = Field(default_factory=list, description="One for each tensor-parallel rank; tcp only.")
    layout: str = Field(description="Dtype and ranks; workers compare more.")
    token_bytes: int = Field(description="Bytes of one token's KV cache over all ranks.")
    block_tokens: int = 1


class KVHold(Message):
    """kv_transfer_params `dovetail_hold`: keep the KV blocks of this request for a while if it is aborted."""

    key: str
    weights: int = Field(description="The weight version that the request runs on.")
    min_tokens: int = Field(default=0, description="With fewer tokens computing them anew is cheaper: don't keep them.")


class KVPull(Message):
    """kv_transfer_params `dovetail_pull`: fetch the KV blocks of this prompt. If that fails, compute them."""

    key: str
    host: str
    ports: list[int]
    weights: int
