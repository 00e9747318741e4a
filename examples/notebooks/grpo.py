# %% [markdown]
# # GRPO
# A function checks the responses, and the four responses to a prompt are compared with each other: no reward model
# and no critic. The actor begins with the model of sft.py.

# %%
from dovetail.local.pipeline import Pipeline

MANIFEST = """
apiVersion: dovetail.dev/v1alpha1
kind: RLHFJob
metadata: {name: grpo}
spec:
  stages: [ppo]
  models:
    actor: {source: {path: runs/sft/models/sft}}
    reward: {function: "dovetail.coordinator.data.synthetic:reward", workers: 1}
  data: {prompts: [{synthetic: {size: 256}}], maxPromptTokens: 96}
  ppo: {advantage: grpo, samplesPerPrompt: 4, iterations: 3, globalBatchSize: 64, miniBatchSize: 64,
        microBatchSize: 16, actorOptimizer: {learningRate: 5.0e-4}}
  generation: {maxTokens: 48}
  evaluation: {heldOut: 8, temperature: 0}
  groups:
    - {name: trainers, roles: [trainer]}
    - {name: rollouts, roles: [rollout]}
"""

# %%
with Pipeline.from_manifest(MANIFEST, overwrite=True) as pipeline:
    summary = pipeline.run()
for when, reward in sorted(summary["evaluation"]["reward"].items(), reverse=True):
    print(f"{when}: {reward['mean']:.3f} ± {reward['ci95']:.3f}")
