"""Limits of sizes. Processes keep to them, and the planner relies on them."""

# The most tokens in one forward pass of a scorer on GPUs. On CPUs the samples of one prompt may also take so many.
SCORER_TOKENS = 8192
# The most tokens in one pass on CPUs. Larger passes are slower there, because their results do not fit into the caches.
SCORER_CPU_TOKENS = 2048
# The most bytes of a scorer's logits, in the model's dtype.
SCORER_LOGIT_BYTES = 512 * 2**20
# The tokens of a block of vLLM's KV cache on CPUs.
KV_BLOCK_TOKENS = 128
# On CPUs attention computes the tokens after a prefix or a cache in blocks of so many tokens. Blocks are counted from
# the end of the prompt. So a response that comes in parts gives the same bits, if each part but the last ends at the
# end of a block.
RESPONSE_BLOCK = 64
# The bytes of a chunk of float32 logits. A trainer rank on a GPU computes log-probabilities in such chunks.
LOGPROB_CHUNK_BYTES = 256 * 2**20
# The bytes of GPU memory that a sender of weights and a receiver on the same GPU both map (CUDA IPC).
SHARED_WEIGHT_BYTES = 128 * 2**20
# If an optimizer's two moments live in host memory, so many numbers of each are on the GPU at a time.
OFFLOAD_NUMBERS = 64 * 2**20
# The bytes of attention scores (float32) that are computed at a time if no kernel of torch computes them (bounds,
# sinks).
SCORE_BYTES = 64 * 2**20
