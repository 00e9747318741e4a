"""The settings with which other trainers have the layout of a placement. The names are those of verl (August 2026), TRL
1.10 and NeMo-RL 0.4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.gpus.inventory import Inventory
from dovetail.manifest.types import RLHFJobSpec
from dovetail.planner.candidate import Candidate

STAGES = "# its servers have no pipeline stages that are known here"
NO_CRITIC = "# no such layout is known here for PPO with a critic"


def settings(spec: RLHFJobSpec, candidate: Candidate, model: str, inventory: Inventory) -> dict[str, str]:
    """By trainer, the settings as lines of text. What a trainer cannot do is said in a line that begins with #."""
    actor, serving = candidate.actor_training[0], candidate.generation[0]
    nodes = inventory[actor.pool].per_node
    ppo, prompts = spec.ppo, spec.ppo.global_batch_size // spec.ppo.samples_per_prompt
    here: dict[str, Any] = {
        "model": model,
        "critic": bool(candidate.critic_training),
        "prompts": prompts,
        "samples": ppo.samples_per_prompt,
        "batch": ppo.global_batch_size,
        "mini": ppo.mini_batch_size,
        "micro": actor.micro_batch,
        "prompt": spec.data.max_prompt_tokens,
        "response": spec.generation.max_tokens,
        "actor": actor,
        "serving": serving,
        "beside": serving.overlaps(actor),
        "per_node": min(nodes, actor.gpus),
        "nodes": -(-actor.gpus // nodes),
        "pools": len({share.pool for share in (*candidate.generation, actor)}),
    }
    return {"verl": _text(_verl(here)), "TRL": _text(_trl(here)), "NeMo-RL": _text(_nemo(here))}


def _text(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"


def _verl(here: Mapping[str, Any]) -> list[str]:
    actor, serving, rollout = here["actor"], here["serving"], "actor_rollout_ref.rollout"
    lines = [
        f"algorithm.adv_estimator={'gae' if here['critic'] else 'grpo'}",
        f"data.train_batch_size={here['prompts']}",
        f"data.max_prompt_length={here['prompt']}",
        f"data.max_response_length={here['response']}",
        f"actor_rollout_ref.model.path={here['model']}",
        f"actor_rollout_ref.model.enable_gradient_checkpointing={actor.recompute}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={here['mini'] // here['samples']}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={here['micro']}",
        f"{rollout}.n={here['samples']}",
        f"{rollout}.tensor_model_parallel_size={serving.tp}",
        f"trainer.n_gpus_per_node={here['per_node']}",
        f"trainer.nnodes={here['nodes']}",
    ]
    if actor.pp * actor.tp > 1:
        lines += [
            "actor_rollout_ref.actor.strategy=megatron",
            f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={actor.tp}",
            f"actor_rollout_ref.actor.megatron.pipeline_model_parallel_size={actor.pp}",
        ]
    else:
        lines += [
            "actor_rollout_ref.actor.strategy=fsdp2",
            f"actor_rollout_ref.actor.fsdp_config.optimizer_offload={actor.offload}",
        ]
    if actor.cp > 1:
        strategy = "megatron.context_parallel_size" if actor.pp * actor.tp > 1 else "ulysses_sequence_parallel_size"
        lines.append(f"actor_rollout_ref.actor.{strategy}={actor.cp}")
    if serving.pp > 1:
        lines.append(STAGES)
    if not here["beside"]:
        lines.append("# servers have GPUs of their own: actor_rollout_ref.hybrid_engine=False, separate_async trainer")
    return lines


def _trl(here: Mapping[str, Any]) -> list[str]:
    actor, serving = here["actor"], here["serving"]
    if here["critic"]:
        return [NO_CRITIC]
    lines = [
        "GRPOConfig(",
        "    use_vllm=True,",
        f'    vllm_mode="{"colocate" if here["beside"] else "server"}",',
        *([f"    vllm_tensor_parallel_size={serving.tp},"] if here["beside"] else []),
        f"    num_generations={here['samples']},",
        f"    generation_batch_size={here['batch']},",
        f"    per_device_train_batch_size={here['micro']},",
        f"    gradient_accumulation_steps={here['mini'] // (actor.batch_shares * here['micro'])},",
        f"    max_completion_length={here['response']},",
        f"    gradient_checkpointing={actor.recompute},",
        ")",
        f"# accelerate launch --num_processes {actor.gpus} --num_machines {here['nodes']}",
    ]
    if not here["beside"]:
        serve = f"trl vllm-serve --model {here['model']} --tensor-parallel-size {serving.tp}"
        lines.append(f"# on the servers' GPUs: {serve} --data-parallel-size {serving.dp}")
    if serving.pp > 1:
        lines.append(STAGES)
    if actor.cp > 1:
        lines.append(f"# accelerate: parallelism_config with cp_size {actor.cp}")
    if actor.pp * actor.tp > 1:
        lines.append("# TRL has no such stages and tensor ranks: shard with FSDP or DeepSpeed, with steps divided anew")
    return lines


def _nemo(here: Mapping[str, Any]) -> list[str]:
    actor, serving = here["actor"], here["serving"]
    if here["critic"]:
        return [NO_CRITIC]
    generation = "policy.generation"
    lines = [
        f"grpo.num_prompts_per_step={here['prompts']}",
        f"grpo.num_generations_per_prompt={here['samples']}",
        f"policy.model_name={here['model']}",
        f"policy.train_global_batch_size={here['mini']}",
        f"policy.train_micro_batch_size={here['micro']}",
        f"policy.max_total_sequence_length={here['prompt'] + here['response']}",
        f"{generation}.vllm_cfg.tensor_parallel_size={serving.tp}",
        f"{generation}.vllm_cfg.pipeline_parallel_size={serving.pp}",
        f"{generation}.colocated.enabled={str(here['beside']).lower()}",
    ]
    recompute = str(actor.recompute).lower()
    if actor.pp > 1:
        lines += [
            "policy.dtensor_cfg.enabled=false",
            "policy.megatron_cfg.enabled=true",
            f"policy.megatron_cfg.tensor_model_parallel_size={actor.tp}",
            f"policy.megatron_cfg.pipeline_model_parallel_size={actor.pp}",
            f"policy.megatron_cfg.activation_checkpointing={recompute}",
        ]
    else:
        lines += [
            f"policy.dtensor_cfg.tensor_parallel_size={actor.tp}",
            f"policy.dtensor_cfg.activation_checkpointing={recompute}",
        ]
    if actor.cp > 1:
        lines.append(f"policy.{'megatron' if actor.pp > 1 else 'dtensor'}_cfg.context_parallel_size={actor.cp}")
    lines += [f"cluster.gpus_per_node={here['per_node']}", f"cluster.num_nodes={here['nodes']}"]
    if not here["beside"]:
        lines.append(f"# the cluster also has the {serving.gpus} GPUs of generation: {generation}.colocated.resources")
    if here["pools"] > 1:
        lines.append("# its clusters have GPUs of one kind")
    return lines
