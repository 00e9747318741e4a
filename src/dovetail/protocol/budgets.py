"""Sizes that a process keeps to and that the planner counts on."""

# Tokens of one forward pass of a scorer, on GPUs; one prompt's samples may be in a pass of that many on CPUs, too.
SCORER_TOKENS = 8192
# On CPUs larger passes are slower: what they compute does not fit into the caches.
SCORER_CPU_TOKENS = 2048
# A scorer's logits stay below this, bytes in the model's dtype.
SCORER_LOGIT_BYTES = 512 * 2**20
# A block of vLLM's KV cache on CPUs, tokens.
KV_BLOCK_TOKENS = 128
# On CPUs attention computes the tokens after a prefix or a cache in blocks of so many tokens, counted from the end of
# the prompt. So a response that comes in parts gives the same bits, if each part but the last ends at the end of a
# block.
RESPONSE_BLOCK = 64
# A trainer rank on a GPU computes log-probabilities in chunks of float32 logits of this size.
LOGPROB_CHUNK_BYTES = 256 * 2**20
# On a GPU that a sender of weights shares with a receiver: what both map (CUDA IPC).
SHARED_WEIGHT_BYTES = 128 * 2**20
# Numbers of each of an optimizer's two moments that are on the GPU at a time where the moments live in host memory.
OFFLOAD_NUMBERS = 64 * 2**20
# Scores of attention (float32) that are computed at a time where no kernel of torch computes them (bounds, sinks).
SCORE_BYTES = 64 * 2**20
