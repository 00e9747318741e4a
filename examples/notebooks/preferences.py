# %% [markdown]
# # DPO
# The model of sft.py learns which of two replies is preferred, without a reward model. Nothing is generated.
# `loss: IPO` and `loss: KTO` are the variants.

# %%
from dovetail.local.pipeline import Pipeline

MANIFEST = """
apiVersion: dovetail.dev/v1alpha1
kind: RLHFJob
metadata: {name: dpo}
spec:
  stages: [dpo]
  models: {actor: {source: {path: runs/sft/models/sft}}}
  data: {preferences: [{synthetic: {size: 512}}], maxPromptTokens: 96, maxTokens: 192}
  dpo: {loss: DPO, beta: 0.1, steps: 20, batchSize: 16, microBatchSize: 16, optimizer: {learningRate: 5.0e-4}}
  groups: [{name: trainers, roles: [trainer]}]
"""

# %%
with Pipeline.from_manifest(MANIFEST, overwrite=True) as pipeline:
    dpo = pipeline.run()["dpo"]
print("The loss falls from {loss_before:.3f} to {loss_after:.3f}.".format(**dpo))
print(f"The model ranks {dpo['accuracy']:.0%} of the held-out pairs as they are labelled.")
