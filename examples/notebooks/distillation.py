# %% [markdown]
# # On-policy distillation
# A student draws responses, and learns from the log-probabilities of its teacher. Here the student is the model of
# sft.py, and the teacher that of grpo.py. A teacher may be larger, if it has the same tokenizer.

# %%
from dovetail.local.pipeline import Pipeline

MANIFEST = """
apiVersion: dovetail.dev/v1alpha1
kind: RLHFJob
metadata: {name: distillation}
spec:
  stages: [ppo]
  models:
    actor: {source: {path: runs/sft/models/sft}}
    reference: {source: {path: runs/grpo/models/actor}}
    reward: {function: "dovetail.coordinator.rewards.nothing:zero", workers: 1}
  data: {prompts: [{synthetic: {size: 256}}], maxPromptTokens: 96, heldOut: 0}
  ppo: {advantage: distillation, kl: {coef: 0}, iterations: 4, globalBatchSize: 64, miniBatchSize: 16,
        microBatchSize: 16, actorOptimizer: {learningRate: 5.0e-4}}
  generation: {maxTokens: 48}
  groups: [{name: trainers, roles: [trainer]}, {name: rollouts, roles: [rollout]}]
"""

# %%
with Pipeline.from_manifest(MANIFEST, overwrite=True) as pipeline:
    pipeline.begin_ppo()
    while not pipeline.over:
        metrics = pipeline.train(pipeline.generate_experience())
        print(f"iteration {pipeline.iteration}: {metrics['kl']:.2f} nats a response from the teacher")
    pipeline.finish()
