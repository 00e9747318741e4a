# %% [markdown]
# # Supervised fine-tuning
# A small Llama from random weights learns the built-in dialogue language. The other notebooks begin with its model.

# %%
from dovetail.local.pipeline import Pipeline

MANIFEST = """
apiVersion: dovetail.dev/v1alpha1
kind: RLHFJob
metadata: {name: sft}
spec:
  stages: [sft]
  models:
    actor:
      source:
        scratch:
          architecture: llama
          config: {hidden_size: 64, intermediate_size: 192, num_hidden_layers: 2, num_attention_heads: 2,
                   num_key_value_heads: 2, max_position_embeddings: 256, tie_word_embeddings: false}
    tokenizer: {train: {vocabSize: 512}}
  data: {demonstrations: [{synthetic: {size: 4096}}], maxPromptTokens: 96, maxTokens: 192}
  sft: {steps: 150, batchSize: 16, microBatchSize: 16, optimizer: {learningRate: 5.0e-3}}
  groups: [{name: trainers, roles: [trainer]}]
"""

# %%
with Pipeline.from_manifest(MANIFEST, overwrite=True) as pipeline:
    summary = pipeline.run()
print("The loss falls from {loss_before:.3f} to {loss_after:.3f}.".format(**summary["sft"]))
print("The model is in runs/sft/models/sft: dovetail chat runs/sft --model sft")
