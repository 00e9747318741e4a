// Metrics by category, as in docs/metrics.md: [name, its meaning and its healthy values]. Other metrics are shown last.

export const STAGES = {sft: "Supervised fine-tuning", reward: "Reward model", dpo: "Preferences (DPO)", ppo: "Iterations", evaluation: "Evaluation"};

export const CATEGORIES = [
  ["Look here first", [
    ["reward", "mean score of the samples; healthy: rises over tens of iterations"], ["kl", "distance to the reference, nats per response; healthy: below 0.3 for each token"], ["entropy", "nats per token; healthy: falls slowly"],
    ["response_length", "mean tokens of a response"], ["finished_fraction", "share of responses that ended by themselves; healthy: above 0.9"], ["samples_per_second", ""],
  ]],
  ["Rewards", [
    ["reward_std", "spread of the scores"], ["reward_min", ""], ["reward_max", ""], [/^reward\//, "one reward function, before its weight"],
    ["reward_with_kl", "less the KL penalty"], ["reward_clipped", "share beyond ppo.rewardClip; healthy: below 0.05"], ["equal_reward_groups", "share of prompts with one score; healthy: below 0.5"],
    ["distinct_responses", ""], ["response_length_max", "longest response, tokens"],
    ["episode_turns", ""], ["episode_calls", "calls of tools"], ["episode_branches", ""], ["episodes_discarded", "share that is not trained; healthy: below 0.1"], [/^discarded\//, "share of this cause"], ["groups_dropped", "share of prompts"],
  ]],
  ["Policy", [
    ["approx_kl", "how far the steps moved the policy, nats per token; healthy: below 0.02"], ["clipfrac", "share of clipped tokens; healthy: at most 0.2"], ["dual_clipfrac", ""], ["ratio", "new to old probability; healthy: near 1"],
    ["policy_loss", ""], ["actor_grad_norm", "before clipping"], ["actor_learning_rate", ""], ["kl_coef", ""], ["kl_loss", ""], ["counted_fraction", "share of samples that train"],
    ["advantage_std", ""],
  ]],
  ["Critic", [
    ["explained_variance", "of the returns, 1 is all; healthy: above 0, and rises"], ["value_loss", ""], ["value_clipfrac", ""], ["value", "mean prediction"], ["critic_grad_norm", ""], ["critic_learning_rate", ""],
  ]],
  ["Lag, and engines that differ", [
    ["staleness", "iterations"], ["effective_sample_size", "share of tokens that count; healthy: above 0.7"], [/^importance_/, ""], ["behaviour_kl", ""], [/^mismatch_/, "rollouts against trainers"], [/^routing_/, ""],
  ]],
  ["Time", [
    ["iteration_seconds", ""], [/^seconds_/, "seconds of an iteration"], ["seconds", "the trainers' step"], [/^fusion_/, "inter-stage fusion"],
  ]],
];

// Sorts metrics into categories: [[category, [[metric, meaning]]]].
export function categorized(names) {
  const left = new Set([...names].filter((name) => !/_ci95$/.test(name)));
  const found = [];
  for (const [category, entries] of CATEGORIES) {
    const here = [];
    for (const [pattern, meaning] of entries) {
      for (const name of [...left].sort()) {
        if (typeof pattern === "string" ? name === pattern : pattern.test(name)) {
          here.push([name, meaning]);
          left.delete(name);
        }
      }
    }
    if (here.length) found.push([category, here]);
  }
  if (left.size) found.push(["Other", [...left].sort().map((name) => [name, ""])]);
  return found;
}

export const axisOf = (stage) => (stage === "ppo" || stage === "evaluation" ? "iteration" : "step");

// The points of a metric over a stage's steps. A point has the 95% interval if there is one.
export function points(steps, name) {
  const found = [];
  for (const [step, row] of steps) {
    const value = row.metrics[name], spread = row.metrics[`${name}_ci95`];
    if (Number.isFinite(value)) found.push(spread > 0 ? [step, value, value - spread, value + spread] : [step, value]);
  }
  return found;
}

export function namesOf(steps) {
  const names = new Set();
  for (const row of steps.values()) for (const name of Object.keys(row.metrics)) names.add(name);
  return names;
}
