# %% [markdown]
# # A reward of your own
# The reward is a function in this notebook. RLOO learns from it. The actor begins with the model of sft.py.

# %%
from dovetail.local.pipeline import Pipeline

MANIFEST = """
apiVersion: dovetail.dev/v1alpha1
kind: RLHFJob
metadata: {name: own-reward}
spec:
  stages: [ppo]
  models:
    actor: {source: {path: runs/sft/models/sft}}
    reward: {function: "dovetail.coordinator.rewards.nothing:zero"}  # the function below takes its place
  data: {prompts: [{synthetic: {size: 256}}], maxPromptTokens: 96, heldOut: 0}
  ppo: {advantage: rloo, samplesPerPrompt: 4, iterations: 2, globalBatchSize: 32, miniBatchSize: 32,
        microBatchSize: 16, actorOptimizer: {learningRate: 1.0e-3}}
  generation: {maxTokens: 48}
  groups: [{name: trainers, roles: [trainer]}, {name: rollouts, roles: [rollout]}]
"""


# %%
def reward(prompts: list[str], responses: list[str], **fields: object) -> list[float]:
    """1 for each polite word, less a little for each word. `fields`: what else the prompts' records hold."""
    polite = ("course", "sure", "happy", "thank", "hope")
    return [sum(word in r.lower() for word in polite) - 0.01 * len(r.split()) for r in responses]


# %%
with Pipeline.from_manifest(MANIFEST, reward_function=reward, overwrite=True) as pipeline:
    pipeline.begin_ppo()
    while not pipeline.over:
        experience = pipeline.generate_experience()
        print(f"reward {experience.scores.mean():.3f}, for example of {experience.responses[0].strip()!r}")
        pipeline.train(experience)
    pipeline.finish()
