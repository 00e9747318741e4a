# %% [markdown]
# # Generate and evaluate
# The model that grpo.py trained answers prompts, without trainers and without a reward. Any model folder works as well.

# %%
from dovetail.coordinator.data.synthetic import prompt, quality
from dovetail.local.llm import LLM, SamplingParams

PROMPTS = [prompt(number, "new") for number in range(8)]
# Start it once. It serves until close(); in a program use `with LLM(...) as llm`.
llm = LLM("runs/grpo", model="actor").open()

# %%
params = SamplingParams(n=4, temperature=0.7, max_tokens=48, seed=1)
outputs = llm.generate(PROMPTS, params)
for response in outputs[0].outputs:
    print(f"{response.cumulative_logprob:7.2f}  {len(response.token_ids):2} tokens  {response.text.strip()!r}")

# %% [markdown]
# Measure them: the mean, and the best of four.

# %%
measured = [[quality(str(output.prompt), response.text) for response in output.outputs] for output in outputs]
mean = sum(sum(each) / len(each) for each in measured) / len(measured)
best = sum(max(each) for each in measured) / len(measured)
print(f"quality {mean:.3f}, best of {params.n}: {best:.3f}")

# %%
(reply,) = llm.chat([{"role": "user", "content": "Tell me two things about the cat."}], params)
print(reply.outputs[0].text)
llm.close()
