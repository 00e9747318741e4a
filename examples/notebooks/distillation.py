# %% [markdown]
# # On-policy distillation
# A smaller student draws responses, and learns from the log-probabilities of a teacher, the model of sft.py.

# %%
from dovetail.local.pipeline import Pipeline

MANIFEST = """
apiVersion: dovetail.dev/v1alpha1
kind: RLHFJob
metadata: {name: distillation}
spec:
  stages: [ppo]
  models:
    actor:
      source:
        scratch:
          architecture: llama
          config: {hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1, num_attention_heads: 2,
                   num_key_value_heads: 2, max_position_embeddings: 256, tie_word_embeddings: false}
    reference: {source: {path: runs/sft/models/sft}}
    reward: {function: "dovetail.coordinator.rewards.nothing:zero", workers: 1}
    tokenizer: {path: runs/sft/tokenizer}
  data: {prompts: [{synthetic: {size: 256}}], maxPromptTokens: 96, heldOut: 0}
  ppo: {advantage: distillation, kl: {coef: 0}, iterations: 6, globalBatchSize: 64, miniBatchSize: 16,
        microBatchSize: 16, actorOptimizer: {learningRate: 3.0e-3}}
  generation: {maxTokens: 24}
  groups: [{name: trainers, roles: [trainer]}, {name: rollouts, roles: [rollout]}]
"""

# %%
with Pipeline.from_manifest(MANIFEST, overwrite=True) as pipeline:
    pipeline.begin_ppo()
    while not pipeline.over:
        metrics = pipeline.train(pipeline.generate_experience())
        print(f"iteration {pipeline.iteration}: {metrics['kl']:.1f} nats a response from the teacher")
    pipeline.finish()
