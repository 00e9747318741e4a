"""What is measured: models of published sizes, and what of them one process holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Config = dict[str, Any]


def llama(hidden: int, inner: int, layers: int, heads: int, keys: int, vocabulary: int) -> Config:
    """As its config.json has it."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }


LLAMA_7B = llama(4096, 11008, 32, 32, 32, 32000)
LLAMA_13B = llama(5120, 13824, 40, 40, 40, 32000)
LLAMA_33B = llama(6656, 17920, 60, 52, 52, 32000)
LLAMA3_8B = llama(4096, 14336, 32, 32, 8, 128256)
LLAMA3_70B = llama(8192, 28672, 80, 64, 8, 128256)
QWEN2_7B = {**llama(3584, 18944, 28, 28, 4, 152064), "model_type": "qwen2"}
QWEN3_30B_A3B = {
    **llama(2048, 6144, 48, 32, 4, 151936),
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}


@dataclass(frozen=True)
class Case:
    """Training of actor and critic (None: without one) with pp stages, dp and tp ranks, or, as `scores`, what a scorer
    holds in as many stages. `rows`: samples of `prompt` and `response` tokens in a micro-batch, of which an optimizer
    step has `micro_batches`. `schedule`: letters by rank; without: 1F1B, actor, then critic. `shared`: the critic is a
    head on the actor. `critic_pp`: the critic's stages, where it has fewer than the actor on the same ranks. `chunks`:
    the stages of each model on a rank, down the ranks and back."""

    name: str
    actor: Config
    critic: Config | None = None
    pp: int = 1
    dp: int = 1
    tp: int = 1
    rows: int = 4
    prompt: int = 512
    response: int = 512
    micro_batches: int = 4
    schedule: tuple[str, ...] = ()
    recompute: bool = False
    zero3: bool = False
    offload: bool = False
    lora: int = 0
    ema: bool = False
    shared: bool = False
    critic_pp: int = 0
    chunks: int = 1
    scores: tuple[Literal["reference", "reward", "critic"], ...] = field(default=())

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp


# The search of schedules found these, within the memory of serial 1F1B as for every job on GPUs. The critic's stages
# run from the last rank to the first.
FUSED = ("FfFbfFbfbFBfbBBB", "FffFbBFfbBFfbBbB", "fFfBFbfFBbfFBbBb", "ffFBfFBFBfbFBbbb")
# Of two stages a rank: fused-v, and its form with whole backward passes.
FUSED_V = (
    "FFFff1ff1F1I1W1F1I1i1iwi1iwIw1FIw1W1ff1WWff1F1I1W1i1iwF1I1i1iwIw1w1WW1IW",
    "FfFff1F1f1F1I1i1W1I1i1iwIiIwFfFw1f1w1fW1WF1f1Wi1I1F1w1ii1I1wIiww1W1IWWW1",
    "fFfFF1f1F1f1i1I1W1i1I1IiwIiwfFfw1Fw1f1W1F1WF1i1w1f1WI1i1iwII1w1iwIW1WW1W",
    "fffFF1FF1f1i1w1f1i1I1IW1I1Iiwfiww1FF1W1FF1Wf1i1w1Wf1i1w1I1IiwW1I1IiwWW1W",
)
FUSED_V_WHOLE = (
    "FFff1ff1F1B1F1B1b1Fbfb1f1bF1FB1ff1BF1B1b1bb1bBBB",
    "FfFff1F1f1F1B1b1B1b1fFbBf1F1bFfBf1F1B1b1B1b1bBbB",
    "fFfFF1f1F1f1b1B1b1fB1BFbF1f1BfFbF1f1b1B1b1B1BbBb",
    "ffFF1FF1f1b1f1b1fB1BB1FF1Bff1b1FF1bf1b1B1BB1Bbbb",
)

CASES = (
    Case("7B, one rank", LLAMA_7B),
    Case("7B, one rank, one micro-batch", LLAMA_7B, micro_batches=1),
    Case("7B, one rank, checkpointing", LLAMA_7B, recompute=True),
    Case("7B, one rank, offload", LLAMA_7B, offload=True),
    Case("7B, one rank, LoRA", LLAMA_7B, lora=16),
    Case("7B, one rank, averaged", LLAMA_7B, ema=True),
    Case("7B, value head beside", LLAMA_7B, shared=True),
    Case("7B + 7B, pp 4", LLAMA_7B, LLAMA_7B, pp=4, rows=2),
    Case("7B + 7B, pp 4, fused", LLAMA_7B, LLAMA_7B, pp=4, rows=2, schedule=FUSED),
    Case("7B + 7B, pp 4, two stages a rank", LLAMA_7B, LLAMA_7B, pp=4, rows=2, schedule=FUSED_V, chunks=2),
    Case(
        "7B + 7B, pp 4, two stages a rank, not split",
        LLAMA_7B,
        LLAMA_7B,
        pp=4,
        rows=2,
        schedule=FUSED_V_WHOLE,
        chunks=2,
    ),
    Case("7B + 7B, pp 4 beside pp 2", LLAMA_7B, LLAMA_7B, pp=4, rows=2, critic_pp=2),
    Case("7B + 7B, dp 4", LLAMA_7B, LLAMA_7B, dp=4),
    Case("7B + 7B, dp 4, one micro-batch", LLAMA_7B, LLAMA_7B, dp=4, micro_batches=1),
    Case("7B + 7B, dp 4, ZeRO-3", LLAMA_7B, LLAMA_7B, dp=4, zero3=True),
    Case("7B + 7B, tp 4", LLAMA_7B, LLAMA_7B, tp=4),
    Case("7B + 7B, pp 2, dp 2", LLAMA_7B, LLAMA_7B, pp=2, dp=2, rows=2),
    Case("8B (128k vocabulary), dp 2", LLAMA3_8B, dp=2),
    Case("8B (128k vocabulary), pp 4", LLAMA3_8B, pp=4),
    Case("8B (128k vocabulary), long responses, checkpointing", LLAMA3_8B, rows=2, response=3584, recompute=True),
    Case("Qwen2 7B (152k vocabulary), LoRA, dp 2", QWEN2_7B, lora=32, dp=2),
    Case("13B + 7B, pp 4, dp 2, offload", LLAMA_13B, LLAMA_7B, pp=4, dp=2, rows=1, offload=True),
    Case("13B + 13B, dp 8, checkpointing", LLAMA_13B, LLAMA_13B, dp=8, recompute=True),
    Case("13B + 13B, dp 8, ZeRO-3, checkpointing", LLAMA_13B, LLAMA_13B, dp=8, recompute=True, zero3=True),
    Case("33B, pp 8", LLAMA_33B, pp=8, rows=1, micro_batches=8),
    Case("33B, pp 4, tp 2, checkpointing", LLAMA_33B, pp=4, tp=2, recompute=True),
    Case("70B, pp 8, checkpointing, offload", LLAMA3_70B, pp=8, rows=1, micro_batches=8, recompute=True, offload=True),
    Case("70B, tp 8", LLAMA3_70B, tp=8, rows=1),
    Case(
        "70B, pp 2, dp 4, ZeRO-3, checkpointing, offload",
        LLAMA3_70B,
        pp=2,
        dp=4,
        rows=1,
        recompute=True,
        zero3=True,
        offload=True,
    ),
    Case("70B, pp 8, LoRA, checkpointing", LLAMA3_70B, pp=8, rows=1, micro_batches=8, lora=16, recompute=True),
    Case("scorer: 7B reference, reward and critic", LLAMA_7B, LLAMA_7B, scores=("reference", "reward", "critic")),
    Case("scorer: 8B reference", LLAMA3_8B, scores=("reference",)),
    Case("scorer: 70B reference", LLAMA3_70B, scores=("reference",)),
    Case("scorer: 33B reward in 4 stages", LLAMA_33B, pp=4, scores=("reward",)),
)
GEMMA2_9B = {
    "model_type": "gemma2",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "vocab_size": 256000,
}
# Seconds, not minutes: for a test. One layer stands for many.
SMALL = (
    Case("8B's layers, one rank", {**LLAMA3_8B, "num_hidden_layers": 4}),
    Case(
        "7B's layers, pp 2, checkpointing",
        {**LLAMA_7B, "num_hidden_layers": 6},
        {**LLAMA_7B, "num_hidden_layers": 6},
        pp=2,
        recompute=True,
    ),
    Case(
        "7B's layers, dp 2, offload",
        {**LLAMA_7B, "num_hidden_layers": 6},
        {**LLAMA_7B, "num_hidden_layers": 6},
        dp=2,
        offload=True,
    ),
    Case(
        "7B's layers, dp 2, ZeRO-3",
        {**LLAMA_7B, "num_hidden_layers": 6},
        {**LLAMA_7B, "num_hidden_layers": 6},
        dp=2,
        zero3=True,
    ),
    Case("8B's layers, tp 2", {**LLAMA3_8B, "num_hidden_layers": 4}, tp=2),
    Case(
        "scorer: 7B's layers",
        {**LLAMA_7B, "num_hidden_layers": 4},
        {**LLAMA_7B, "num_hidden_layers": 4},
        scores=("reference", "critic"),
    ),
    Case("scorer: experts", {**QWEN3_30B_A3B, "num_hidden_layers": 2}, scores=("reference",)),
    Case("experts", {**QWEN3_30B_A3B, "num_hidden_layers": 2}, rows=2),
    Case("bounded scores", {**GEMMA2_9B, "num_hidden_layers": 4}, rows=2, response=3584),
)
# Actor and critic have unlike pipelines on the same ranks.
UNLIKE = Case(
    "7B's layers, pp 2 beside pp 1",
    {**LLAMA_7B, "num_hidden_layers": 4},
    {**LLAMA_7B, "num_hidden_layers": 4},
    pp=2,
    critic_pp=1,
)
