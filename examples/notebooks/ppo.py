# %% [markdown]
# # PPO, call by call
# A reward model learns preferences, and PPO raises its reward. The actor begins with the model of sft.py.

# %%
from dovetail.local.pipeline import Pipeline

MANIFEST = """
apiVersion: dovetail.dev/v1alpha1
kind: RLHFJob
metadata: {name: ppo}
spec:
  stages: [reward, ppo]
  models: {actor: {source: {path: runs/sft/models/sft}}}
  data:
    preferences: [{synthetic: {size: 512}}]
    prompts: [{synthetic: {size: 256}}]
    maxPromptTokens: 96
    maxTokens: 192
  reward: {steps: 20, batchSize: 16, microBatchSize: 16, optimizer: {learningRate: 2.0e-3}}
  ppo: {iterations: 2, globalBatchSize: 16, miniBatchSize: 16, microBatchSize: 16}
  generation: {maxTokens: 48}
  evaluation: {heldOut: 8}
  groups:
    - {name: trainers, roles: [trainer]}
    - {name: rollouts, roles: [rollout]}
"""

# %%
with Pipeline.from_manifest(MANIFEST, overwrite=True) as pipeline:
    pipeline.run_reward()
    pipeline.begin_ppo()
    while not pipeline.over:
        experience = pipeline.generate_experience()
        metrics = pipeline.train(experience)
        print(f"iteration {pipeline.iteration}: reward {metrics['reward']:.3f}, KL {metrics['kl']:.4f}")
    pipeline.finish()
