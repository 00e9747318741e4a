"""A good RLHFJob, and bad ones with the sentences that users get for them."""

from __future__ import annotations

import copy
from enum import Enum

from dovetail.manifest.base import LOSSES

GOOD = {
    "apiVersion": "dovetail.dev/v1beta1",
    "kind": "RLHFJob",
    "metadata": {"name": "job"},
    "spec": {
        "models": {
            "actor": {"source": {"scratch": {"config": {"hidden_size": 64, "num_hidden_layers": 2}}}},
            "tokenizer": {"train": {"vocabSize": 512}},
        },
        "data": {
            "demonstrations": [{"synthetic": {}}],
            "preferences": [{"synthetic": {}}],
            "prompts": [{"synthetic": {}}],
        },
        "groups": [
            {"name": "trainers", "roles": ["trainer"], "replicas": 2},
            {"name": "rollouts", "roles": ["rollout"], "replicas": 2},
        ],
    },
}


class Delete(Enum):
    """In place of a value: the field is taken away. (Its text is the same in every process: test ids hold it.)"""

    DELETE = "delete"


DELETE = Delete.DELETE


def changed(**changes):
    """GOOD with dotted paths (`ppo.clip`, `groups.0.name`) set below spec, or deleted."""
    manifest = copy.deepcopy(GOOD)
    for path, value in changes.items():
        node = manifest["spec"]
        *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        for step in steps:
            node = node[step] if isinstance(node, list) else node.setdefault(step, {})
        if value is DELETE:
            del node[last]
        elif isinstance(node, list) and last == len(node):
            node.append(value)
        else:
            node[last] = value
    return manifest


def _own_container(**fields):
    return {"spec": {"containers": [{"name": "dovetail", **fields}]}}


HF, SCRATCH = {"source": {"huggingFace": "a/b"}}, {"source": {"scratch": {}}}
FIELDS = [
    ({"ppo.miniBatchSze": 4}, "spec.ppo.miniBatchSze is not a field; did you mean miniBatchSize?"),
    ({"ppo.mini_batch_size": 4}, "spec.ppo.mini_batch_size is not a field; did you mean miniBatchSize?"),
    ({"group": []}, "spec.group is not a field; did you mean groups?"),
    ({"groups.0.gpu": {"perpod": 2}}, "spec.groups[0].gpu.perpod is not a field; did you mean perPod?"),
    ({"plan.zzz": 1}, "spec.plan.zzz is not a field; spec.plan has placement, interStageFusion, intraStageFusion, "),
    ({"groups": DELETE}, "spec.groups is required (The pods, by kind of hardware); add it."),
    ({"groups": []}, "spec.groups must be a list of 1 to 32 items; it has 0."),
    ({"groups": {"name": "a"}}, "spec.groups must be a list of 1 to 32 items; it is a mapping."),
    ({"groups.0.name": "Big_A"}, "spec.groups[0].name must be lower-case letters, digits and dashes, starting and"),
    (
        {"output": {"s3": {"bucket": "A B"}}},
        "spec.output.s3.bucket must be lower-case letters, digits, dashes, dots and",
    ),
    (
        {"output": {"s3": {"bucket": "abc", "endpoint": "ftp://x"}}},
        "spec.output.s3.endpoint must be the URL of a server",
    ),
    ({"groups.0.name": DELETE}, "spec.groups[0].name is required"),
    ({"groups.0.roles": ["trainr"]}, 'spec.groups[0].roles[0] must be one of trainer, rollout; it is "trainr".'),
    ({"groups.0.replicas": 0}, "spec.groups[0].replicas must be a whole number of at least 1 and at most 4096 (or"),
    ({"ppo.clip": "0.2"}, 'spec.ppo.clip must be a number above 0; it is "0.2".'),
    ({"ppo.clip": True}, "spec.ppo.clip must be a number above 0; it is true."),
    ({"ppo.clip": float("nan")}, "spec.ppo.clip must be a number above 0; it is nan."),
    ({"ppo.epochs": 1.5}, "spec.ppo.epochs must be a whole number of at least 1; it is 1.5."),
    ({"ppo.epochs": None}, "spec.ppo.epochs must be a whole number of at least 1; it is null."),
    (
        {"ppo.advantage": "gea"},
        "spec.ppo.advantage must be one of gae, grpo, rloo, reinforce++, reinforce++-baseline, distillation; it is "
        '"gea".',
    ),
    ({"ppo.ema": 1.0}, "spec.ppo.ema must be a number above 0 and below 1 (or null); it is 1.0."),
    ({"ppo.gamma": 1.5}, "spec.ppo.gamma must be a number of at least 0 and at most 1; it is 1.5."),
    ({"ppo.whitenAdvantages": "yes"}, 'spec.ppo.whitenAdvantages must be true or false; it is "yes".'),
    ({"ppo.advantageFunction": "os.system"}, "spec.ppo.advantageFunction must be a Python function as module:callable"),
    ({"ppo.loss": "pgo"}, f"spec.ppo.loss must be {', '.join(LOSSES)} or a Python function as module:callable"),
    (
        {"evaluation": {"metrics": ["bleu"]}},
        "spec.evaluation.metrics[0] must be reward, exactMatch or a Python function as module:callable",
    ),
    ({"stages": ["sft", "rm"]}, 'spec.stages[1] must be one of sft, reward, dpo, ppo; it is "rm".'),
    ({"plan.parallelism": "Some"}, "spec.plan.parallelism must be Auto or a mapping"),
    ({"plan.parallelism": {"critic": {}}}, "spec.plan.parallelism.actor is required"),
    ({"plan.parallelism": {"actor": {"pp": 0}}}, "spec.plan.parallelism.actor.pp must be a whole number of at least 1"),
    ({"ppo.lag": 17}, "spec.ppo.lag must be Auto or a whole number of at least 0 and at most 16; it is 17."),
    (
        {"plan.interStageFusion": 1.2},
        "spec.plan.interStageFusion must be one of Auto, Off or a number of at least 0 and",
    ),
    ({"generation.stop": "END"}, 'spec.generation.stop must be a list of at most 16 items; it is "END".'),
    ({"models": [1]}, "spec.models must be a mapping"),
    (
        {"failurePolicy.maxRestarts": -1},
        "spec.failurePolicy.maxRestarts must be a whole number of at least 0; it is -1.",
    ),
]
RULES = [
    *(
        ({f"evaluation.{field}": value}, f"spec.evaluation.{field} has no effect without evaluations during PPO")
        for field, value in {"keepBest": True, "stopAfterNoGain": 2}.items()
    ),
    *(
        (
            {"evaluation": {"everyIterations": 2, **none}, **more},
            "everyIterations is given, but no prompts are kept",
        )
        for none, more in (({"heldOut": 0}, {}), ({}, {"data.heldOut": 0}))
    ),
    ({"trackers": [{"kind": "wandb"}, {"kind": "wandb"}]}, "spec.trackers names a kind twice; keep one of each."),
    ({"evaluation": {"metrics": ["a:f", "b:f"]}}, "spec.evaluation.metrics has two of the same name"),
    ({"evaluation": {"prompts": [{}]}}, "spec.evaluation.prompts[0] names nothing; give exactly one of"),
    ({"stages": ["ppo", "sft"]}, "spec.stages must be in the order sft, reward, dpo, ppo; write [sft, ppo]."),
    (
        {"stages": ["sft", "dpo", "ppo"]},
        "spec.stages has dpo beside reward or ppo, which it takes the place of; remove",
    ),
    (
        {"dpo": {"loss": "IPO", "labelSmoothing": 0.1}},
        "spec.dpo.labelSmoothing is for loss DPO, but spec.dpo.loss is IPO",
    ),
    (
        {"stages": ["dpo"], "dpo": {"loss": "KTO", "batchSize": 1, "microBatchSize": 1}},
        "spec.dpo.batchSize is 1, but loss KTO compares the pairs of a batch; make it at least 2.",
    ),
    ({"stages": ["sft", "sft"]}, "spec.stages names a stage twice"),
    ({"models.actor": {}}, "spec.models.actor.source is required"),
    ({"models.actor.source.path": "x"}, "spec.models.actor.source has path and scratch; give exactly one of"),
    ({"models.critic": {"source": {}}}, "spec.models.critic.source names nothing; give exactly one of"),
    (
        {"models.actor.source": {"huggingFace": "https://huggingface.co/Qwen/Qwen2.5-0.5B"}},
        "spec.models.actor.source.huggingFace: https://huggingface.co/Qwen/Qwen2.5-0.5B is an address; write "
        "Qwen/Qwen2.5-0.5B.",
    ),
    (
        {"data.prompts": [{"path": "https://huggingface.co/datasets/openai/gsm8k/tree/v1"}]},
        "spec.data.prompts[0].path: https://huggingface.co/datasets/openai/gsm8k/tree/v1 is an address; write "
        "huggingFace: openai/gsm8k with revision: v1.",
    ),
    (
        {"data.prompts": [{"path": "s3://bucket/x.jsonl"}]},
        "spec.data.prompts[0].path: s3://bucket/x.jsonl is an address; no s3:// is read: copy the files to a folder",
    ),
    ({"output": {"path": "s3://bucket/models"}}, "spec.output.path is an address, but a path is a folder"),
    ({"models.critic": {"source": {"path": "x", "revision": "y"}}}, "spec.models.critic.source.revision belongs to"),
    ({"models.critic": {"source": {"pvc": "claim"}}}, "spec.models.critic.source.pvc must be claim/path"),
    *(
        ({f"models.{name}.dtype": "float16"}, f"spec.models.{name}.dtype float16 cannot be trained in")
        for name in ("actor", "critic", "reward")
    ),
    ({"models.actor.lora": {"dropout": 1.0}}, "spec.models.actor.lora.dropout is 1"),
    ({"models.actor.lora": {"targetModules": ["q", "q"]}}, "spec.models.actor.lora.targetModules names a module twice"),
    ({"models.reference": {"lora": {}}}, "spec.models.reference.lora has no effect"),
    ({"models.reference": {"routerAuxLossCoef": 0.1}}, "spec.models.reference.routerAuxLossCoef has no effect"),
    ({"models.actor.source.scratch.config.vocab_size": 9}, "config.vocab_size comes from the tokenizer; remove it."),
    (
        {"models.actor.source.scratch.config.num_attention_heads": 3},
        "config.hidden_size is 64, which num_attention_heads (3) does not divide; make it a multiple of 3.",
    ),
    ({"models.actor.source.scratch.config.hidden_size": "64"}, "hidden_size must be a whole number of at least 1"),
    *(
        ({f"models.critic.source.scratch.config.{size}": 0}, f"{size} must be a whole number of at least 1; it is 0.")
        for size in (
            *("intermediate_size", "ffn_dim", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
            *("head_dim", "max_position_embeddings"),
        )
    ),
    (
        {"models.critic.source.scratch.config": {"num_attention_heads": 4, "num_key_value_heads": 3}},
        "num_attention_heads is 4, which num_key_value_heads (3) does not divide; make it a multiple of 3.",
    ),
    ({"models.reward": {"function": "a:b", **HF}}, "spec.models.reward.source cannot go with spec.models.reward.func"),
    (
        {"models.reward": {"function": "a:b", "lora": {}}},
        "spec.models.reward.lora cannot go with spec.models.reward.fun",
    ),
    (
        {"models.reward": {"functions": [{"function": "a:b"}], **HF}},
        "spec.models.reward.source cannot go with spec.models.reward.functions",
    ),
    (
        {"models.reward": {"function": "a:b", "functions": [{"function": "a:c"}]}},
        "spec.models.reward has both function and functions",
    ),
    (
        {"models.reward": {"functions": [{"function": "a:b"}, {"function": "c:d", "name": "b"}]}},
        "spec.models.reward.functions has two of the same name",
    ),
    (
        {"models.reward": {"functions": [{"function": "a:b", "weight": 0}]}},
        "spec.models.reward.functions gives every function the weight 0",
    ),
    ({"models.reward": {"function": "a:b"}, "stages": ["reward"]}, "spec.stages has only reward, but"),
    ({"stages": ["sft", "ppo"]}, "spec.models.reward needs a source or a function when spec.stages has ppo without"),
    ({"stages": ["ppo"], "models.reward": SCRATCH}, "spec.models.reward.source.scratch is an untrained reward model"),
    ({"models.tokenizer": {}}, "spec.models.tokenizer is required for an actor from scratch"),
    ({"models.tokenizer.path": "x"}, "spec.models.tokenizer has more than one of path, pvc and train"),
    ({"models.actor": HF}, "spec.models.tokenizer.train makes a new vocabulary"),
    ({"data.demonstrations": []}, "spec.data.demonstrations is empty, but the sft stage needs it"),
    ({"data.preferences": []}, "spec.data.preferences is empty, but the reward stage needs it"),
    ({"stages": ["dpo"], "data.preferences": []}, "spec.data.preferences is empty, but the dpo stage needs it"),
    ({"stages": ["dpo"], "data.split": {"reward": 0}}, "spec.data.split.reward is 0, but spec.stages has dpo"),
    ({"data.prompts": []}, "spec.data.prompts is empty, but the ppo stage needs it"),
    (
        {"data.prompts": [{}]},
        "spec.data.prompts[0] names nothing; give exactly one of huggingFace, path, pvc, synthetic.",
    ),
    ({"data.prompts": [{"pvc": "mine"}]}, "spec.data.prompts[0].pvc must be claim/path"),
    ({"models.reward.code": {"configMap": "x"}}, "spec.models.reward.code has no effect without a function"),
    (
        {"models.reward": {"function": "a:b", "importPath": "x", "code": {"configMap": "x"}}},
        "spec.models.reward has both code and importPath",
    ),
    (
        {"models.reward": {"function": "a:b", "code": {}}},
        "spec.models.reward.code names nothing; give exactly one of configMap, pvc.",
    ),
    (
        {"models.reward": {"function": "a:b", "code": {"configMap": "x", "pvc": "c/x"}}},
        "spec.models.reward.code has configMap and pvc; give exactly one of configMap, pvc.",
    ),
    ({"output": {}}, "spec.output names nothing; give exactly one of path, pvc, s3."),
    ({"output": {"path": "/x", "pvc": "c/x"}}, "spec.output has path and pvc; give exactly one of path, pvc, s3."),
    ({"output": {"pvc": "c/../../d"}}, "spec.output.pvc must be claim/path"),
    ({"data.prompts": [{"pvc": "../mine"}]}, "spec.data.prompts[0].pvc must be claim/path"),
    ({"output": {"pvc": "c"}}, "spec.output.pvc must be claim/path, the claim's name and a folder in it; it is 'c'."),
    ({"data.prompts.0.path": "x"}, "spec.data.prompts[0] has path and synthetic"),
    ({"data.prompts": [{"path": "x", "subset": "y"}]}, "spec.data.prompts[0].subset belongs to huggingFace"),
    ({"data.prompts": [{"path": "x", "split": "test"}]}, "spec.data.prompts[0].split belongs to huggingFace"),
    *(
        ({"data.split": {stage: 0}}, f"spec.data.split.{stage} is 0, but spec.stages has {stage}")
        for stage in ("sft", "reward", "ppo")
    ),
    (
        {"data.prompts": [{"synthetic": {}, "systemPrompt": "Be kind."}]},
        "spec.data.prompts[0].systemPrompt opens conversations, but synthetic records are texts; remove it.",
    ),
    (
        {"data.chatTemplateKwargs": {"messages": [], "enable_thinking": False, "a-b": 1}},
        "spec.data.chatTemplateKwargs has a-b, messages, which cannot be an option of a chat template",
    ),
    (
        {"data.chatTemplateKwargs": {"enable_thinking": False}, "models.tokenizer": {"train": {}}},
        "a tokenizer that the job trains (spec.models.tokenizer.train) has none; remove them.",
    ),
    ({"data.heldOut": 1.0}, "spec.data.heldOut is 1, which leaves nothing to train on"),
    (
        {"stages": ["reward", "ppo"], "data.demonstrations": [], "ppo.ptxCoef": 0.1},
        "spec.ppo.ptxCoef is above 0, but spec.data.demonstrations is empty",
    ),
    (
        {"ppo.samplesPerPrompt": 3},
        "spec.ppo.globalBatchSize is 64, which spec.ppo.samplesPerPrompt (3) does not divide; make it a multiple of 3.",
    ),
    ({"ppo.miniBatchSize": 48}, "spec.ppo.globalBatchSize is 64, which spec.ppo.miniBatchSize (48) does not divide"),
    (
        {"ppo.microBatchSize": 7},
        "spec.ppo.miniBatchSize is 64, which cannot be cut into micro-batches of 7 (spec.ppo.microBatchSize) on the "
        "actor; make it a multiple of 7.",
    ),
    ({"sft.batchSize": 12}, "spec.sft.batchSize is 12, which cannot be cut into micro-batches of 8"),
    ({"reward.microBatchSize": 5}, "spec.reward.batchSize is 32, which cannot be cut into micro-batches of 5"),
    ({"plan.parallelism": {"actor": {"tp": 2}, "critic": {"dp": 2}}}, "the actor's tp 2 and the critic's tp 1 differ"),
    (
        {"plan.parallelism": {"actor": {"tp": 2}}, "models.actor.lora": {"dropout": 0.1}},
        "spec.plan.parallelism.actor.tp is 2, but adapters with dropout (spec.models.actor.lora) are not split",
    ),
    (
        {
            "plan.parallelism": {"actor": {"dp": 2, "ep": 2}},
            "models.actor.lora": {"targetModules": ["experts.down_proj"]},
        },
        "spec.plan.parallelism.actor.ep is 2, but adapters on experts (spec.models.actor.lora.targetModules) are not",
    ),
    (
        {"ppo.microBatchSize": 64, "plan.parallelism": {"actor": {"dp": 2}}},
        "on 2 data-parallel ranks of the actor; make it a multiple of 128.",
    ),
    *(
        (
            {
                f"{stage}.batchSize": 8,
                "groups.0.replicas": 4,
                "plan.parallelism": {
                    "actor": {"dp": actor, "pp": 4 // actor},
                    "critic": {"dp": critic, "pp": 4 // critic},
                },
            },
            f"micro-batches of 8 (spec.{stage}.microBatchSize) on {dp} data-parallel ranks of the {model}; make it a",
        )
        for stage, model, actor, critic, dp in (("sft", "actor", 2, 4, 2), ("reward", "reward", 4, 2, 2))
    ),
    (
        {
            "ppo.microBatchSize": 32,
            "groups.0.replicas": 4,
            "plan.parallelism": {"actor": {"dp": 2, "pp": 2}, "critic": {"dp": 4}},
        },
        "on 4 data-parallel ranks of the critic; make it a multiple of 128.",
    ),
    *(
        (
            {
                f"{stage}.microBatchTokens": 10**5,
                f"{stage}.{'miniBatchSize' if stage == 'ppo' else 'batchSize'}": 2,
                "groups.0.replicas": 4,
                "plan.parallelism": {
                    "actor": {"dp": actor, "pp": 4 // actor},
                    "critic": {"dp": critic, "pp": 4 // critic},
                },
            },
            f"is 2, which 4 data-parallel ranks of the {model} cannot share; make it a multiple of 4.",
        )
        for stage, model, actor, critic in (
            ("ppo", "actor", 4, 2),
            ("ppo", "critic", 2, 4),
            ("sft", "actor", 4, 2),
            ("reward", "reward", 2, 4),
        )
    ),
    (
        {"ppo.microBatchTokens": 1023},
        "spec.ppo.microBatchTokens is 1023, but a prompt and its response may have 1024 tokens (data.maxPromptTokens "
        "and generation.maxTokens); make it at least 1024.",
    ),
    *(
        (
            {"stages": ["dpo"], "groups.0.replicas": 4, "plan.parallelism": {"actor": {"dp": 4}}, "dpo": sizes},
            f"spec.dpo.batchSize is 6, which {problem}",
        )
        for sizes, problem in (
            (
                {"batchSize": 6, "microBatchSize": 3},
                "cannot be cut into micro-batches of 3 (spec.dpo.microBatchSize) on 4",
            ),
            ({"batchSize": 6, "microBatchTokens": 4096}, "4 data-parallel ranks of the actor cannot share"),
        )
    ),
    (
        {"stages": ["dpo"], "dpo.microBatchSize": 5},
        "spec.dpo.batchSize is 32, which cannot be cut into micro-batches of 5",
    ),
    (
        {"stages": ["dpo"], "dpo.microBatchTokens": 2047},
        "spec.dpo.microBatchTokens is 2047, but a pair of sequences may have 2048",
    ),
    ({"sft.microBatchTokens": 100}, "spec.sft.microBatchTokens is 100, but a sequence may have 1024 tokens"),
    ({"reward.microBatchTokens": 2047}, "spec.reward.microBatchTokens is 2047, but a pair of sequences may have 2048"),
    (
        {"ppo.microBatchTokens": "Auto", "plan.intraStageFusion": "Fused"},
        "spec.plan.intraStageFusion is Fused, but spec.ppo.microBatchTokens makes as many micro-batches as",
    ),
    ({"ppo.advantage": "grpo"}, "spec.ppo.samplesPerPrompt is 1, but grpo compares samples of the same prompt"),
    (
        {"ppo.advantage": "rloo", "ppo.samplesPerPrompt": 4, "ppo.criticWarmupIterations": 1},
        "spec.ppo.criticWarmupIterations is 1, but rloo has no critic; remove it.",
    ),
    *(
        ({"models.critic": {"shareActorBody": True, **critic}, **changes}, f"{field} cannot go with spec.models.critic")
        for field, critic, changes in (
            ("spec.models.critic.source", {"source": {"path": "x"}}, {}),
            ("spec.models.critic.lora", {"lora": {}}, {}),
            ("spec.models.critic.dtype", {"dtype": "bfloat16"}, {}),
            ("spec.ppo.criticOptimizer", {}, {"ppo.criticOptimizer": {"learningRate": 1e-4}}),
            ("spec.ppo.criticWarmupIterations", {}, {"ppo.criticWarmupIterations": 1}),
            ("spec.plan.parallelism.critic", {}, {"plan.parallelism": {"actor": {"dp": 2}, "critic": {"dp": 2}}}),
            *(
                (
                    "spec.plan.intraStageFusion Fused, TimeSharing or Dedicated",
                    {},
                    {"plan.intraStageFusion": pin},
                )
                for pin in ("Fused", "TimeSharing", "Dedicated")
            ),
        )
    ),
    (
        {"ppo.advantage": "grpo", "ppo.samplesPerPrompt": 4, "ppo.lamAlpha": 0.05},
        "spec.ppo.lamValue and lamAlpha belong to generalised advantage estimation; remove them",
    ),
    *(
        ({"ppo.advantage": "distillation", **fields}, sentence)
        for fields, sentence in (
            (
                {"ppo.kl": {"coef": 0}, "models.reward": {"function": "a:b"}},
                "spec.ppo.advantage is distillation, whose teacher is spec.models.reference, but that has no source;",
            ),
            (
                {"models.reward": {"function": "a:b"}, "models.reference": HF},
                "but the advantage distillation is itself the KL to the reference; set it to 0.",
            ),
            (
                {"ppo.kl": {"coef": 0}, "models.reference": HF},
                "spec.ppo.advantage is distillation, to which a reward model has nothing to say; name a function in",
            ),
        )
    ),
    ({"ppo.streaming": "Auto"}, "spec.ppo.streaming is no longer there, because spec.ppo.lag gains more; remove it,"),
    ({"ppo.dynamicSampling": 2}, "spec.ppo.dynamicSampling compares the rewards of one prompt's samples, but"),
    (
        {"ppo.dynamicSampling": 2, "ppo.samplesPerPrompt": 4, "ppo.lag": 1},
        "spec.ppo.lag is 1, but spec.ppo.dynamicSampling draws an iteration's further rounds when the earlier ones are",
    ),
    (
        {
            "ppo.advantage": "distillation",
            "ppo.kl": {"coef": 0},
            "ppo.dynamicSampling": 2,
            "ppo.samplesPerPrompt": 4,
            "models.reward": {"function": "a:b"},
            "models.reference": HF,
        },
        "spec.ppo.dynamicSampling draws other prompts where all rewards of a prompt are equal, but with the advantage",
    ),
    (
        {
            "ppo.advantage": "distillation",
            "ppo.kl": {"coef": 0},
            "ppo.rightCoef": 0.1,
            "models.reward": {"function": "a:b"},
            "models.reference": HF,
        },
        "spec.ppo.rightCoef learns responses that the reward calls right, but with the advantage distillation rewards",
    ),
    ({"ppo.criticWarmupIterations": 100}, "leaves no iteration that trains the actor"),
    ({"ppo.kl": {"coef": 0, "target": 1}}, "spec.ppo.kl.coef is 0, from which the adaptive controller cannot move"),
    ({"ppo.kl": {"estimator": "k3"}}, "spec.ppo.kl.estimator is k3, which in the reward lowers another quantity"),
    ({"ppo.kl": {"estimator": "k2", "in": "Reward"}}, "spec.ppo.kl.estimator is k2, which in the reward lowers"),
    (
        {"ppo.kl": {"estimator": "k1", "in": "Loss"}, "ppo.whitenAdvantages": False},
        "spec.ppo.kl.estimator is k1, whose gradient in the loss is 0",
    ),
    (
        {"ppo.kl": {"estimator": "k1"}, "ppo.advantage": "grpo", "ppo.samplesPerPrompt": 2},
        "spec.ppo.kl.estimator is k1, whose gradient in the loss is 0",
    ),
    ({"ppo.kl": {"in": "Loss"}}, "spec.ppo.kl.in is Loss, but spec.ppo.whitenAdvantages divides by a deviation"),
    (
        {"ppo.advantage": "reinforce++", "ppo.kl": {"in": "Loss"}},
        "spec.ppo.kl.in is Loss, but spec.ppo.advantage reinforce++ divides by a deviation",
    ),
    (
        {"ppo.advantage": "rloo", "ppo.samplesPerPrompt": 2, "ppo.whitenRewards": True, "ppo.kl": {"in": "Loss"}},
        "spec.ppo.kl.in is Loss, but spec.ppo.whitenRewards divides by a deviation",
    ),
    ({"ppo.loss": "gspo"}, "spec.ppo.lossAggregation is Token; set it to Sequence."),
    ({"ppo.loss": "cispo", "ppo.dualClip": 3.0}, "spec.ppo.dualClip has no effect with loss cispo; remove it."),
    ({"ppo.clipLow": 1.5}, "spec.ppo.clipLow is above 1"),
    ({"ppo.dropEqualGroups": True}, "the advantages do not compare the samples of one prompt"),
    ({"ppo.overlong": {"fromTokens": 100_000}}, "spec.ppo.overlong.fromTokens is not below its toTokens"),
    ({"ppo.normalizeStd": False}, "spec.ppo.normalizeStd is false, but gae does not divide by a group's deviation"),
    (
        {"ppo.whitenRewards": True, "ppo.advantage": "grpo", "ppo.samplesPerPrompt": 2},
        "spec.ppo.whitenRewards has no effect with grpo",
    ),
    ({"ppo.importPath": "code"}, "spec.ppo.importPath has no effect without advantageFunction or a loss"),
    ({"generation": {"minTokens": 9, "maxTokens": 8}}, "spec.generation.minTokens (9) is above"),
    ({"groups.1.name": "trainers"}, "spec.groups has 'trainers' twice"),
    (
        {"ppo.lag": 1, "groups.0.roles": ["trainer", "rollout"]},
        "spec.ppo.lag is 1, but a group of spec.groups has both roles, trainer and rollout",
    ),
    (
        {"ppo.lag": 1, "ppo.oldLogProbs": "Rollout"},
        "spec.ppo.oldLogProbs is Rollout, but with spec.ppo.lag 1 the rollout's weights are older",
    ),
    ({"groups.0.roles": ["rollout"]}, "spec.groups has no group with the role trainer"),
    ({"groups.1.roles": ["trainer"]}, "spec.groups has no group with the role rollout, but the ppo stage generates"),
    ({"groups.0.roles": ["trainer", "trainer"]}, "spec.groups[0].roles names a role twice"),
    ({"groups.1.minReplicas": 3, "groups.1.maxReplicas": 2}, "minReplicas (3) is above maxReplicas (2)"),
    (
        {"groups.1.minReplicas": 3},
        "spec.groups[1].replicas (2) must be within minReplicas and maxReplicas (from 3 up).",
    ),
    (
        {"groups.1.podTemplate": {"spec": {"containers": [{"image": "x"}]}}},
        "spec.groups[1] has a podTemplate that cannot be applied: podTemplate.spec.containers[0] lacks name",
    ),
    (
        {
            "groups.1.podTemplate": _own_container(
                env=[{"name": "A", "value": "b"}, {"name": "DOVETAIL_TOKEN", "value": "x"}]
            )
        },
        "spec.groups[1].podTemplate gives the container dovetail a variable that Dovetail sets (DOVETAIL_JOB,",
    ),
    (
        {"groups.1.podTemplate": _own_container(volumeMounts=[{"name": "x", "mountPath": "/var/dovetail/models"}])},
        "spec.groups[1].podTemplate mounts a volume over folders of Dovetail (/var/dovetail,",
    ),
    (
        {"groups.1.podTemplate": {"spec": {"volumes": [{"name": "claim-0", "emptyDir": {}}]}}},
        "spec.groups[1].podTemplate has a volume claim-0, which is the name of a volume of Dovetail",
    ),
    (
        {"coordinator.podTemplate": _own_container(**{"$patch": "delete"})},
        "spec.coordinator has a podTemplate that would break its pod: podTemplate.spec.containers[dovetail]",
    ),
    (
        {"coordinator.podTemplate": {"spec": {"restartPolicy": "Always"}}},
        "spec.coordinator.podTemplate.spec.restartPolicy must be Never",
    ),
    ({"groups.1.name": "coordinator"}, "spec.groups[1].name is coordinator, which is the name of another process"),
    ({"groups.0.maxReplicas": 4}, "spec.groups[0] has the role trainer, whose number of pods is fixed"),
    ({"groups.0.gpu": {"perPod": 8}}, "spec.groups[0].gpu.perPod is 8 without gpu.product"),
    ({"groups.0.gpu": {"claimTemplate": "a"}}, "spec.groups[0].gpu.claimTemplate is given without gpu.product"),
    ({"groups.0.gpu": {"product": "A", "perPod": 0}}, "spec.groups[0].gpu.perPod is 0, but gpu.product names a GPU"),
    (
        {"groups.2": {"name": "g", "roles": ["trainer"], "gpu": {"product": "A"}}},
        "spec.groups mixes trainer groups with and without GPUs",
    ),
    ({"groups.0.vllmArgs": ["--x"]}, "spec.groups[0].vllmArgs has no effect without the role rollout"),
    ({"groups.1.vllmArgs": ["--port=1"]}, "spec.groups[1].vllmArgs[0]: --port is set by Dovetail; remove it."),
    *(
        ({"sessions": {"environment": {"function": "a:B"}}, "models.reward": {"function": "a:b"}, **fields}, sentence)
        for fields, sentence in (
            (
                {"sessions": {"environment": {}}},
                "spec.sessions.environment names nothing; give exactly one of function, url.",
            ),
            (
                {"sessions": {"environment": {"function": "a:B", "url": "http://a"}}},
                "spec.sessions.environment has function and url; give exactly one of function, url.",
            ),
            (
                {"sessions": {"agent": {}}},
                "spec.sessions.agent names nothing; give exactly one of command, url.",
            ),
            (
                {"sessions": {"agent": {"command": ["a"], "url": "http://a"}}},
                "spec.sessions.agent has command and url; give exactly one of command, url.",
            ),
            ({"sessions": {}}, "spec.sessions names nothing; give exactly one of environment, agent."),
            (
                {"sessions": {"environment": {"function": "a:B"}, "agent": {"command": ["a"]}}},
                "spec.sessions has environment and agent; give exactly one of environment, agent.",
            ),
            (
                {"sessions": {"agent": {"command": ["a"]}, "effects": "AtMostOnce"}},
                "spec.sessions.effects has no effect with an agent, whose tools are its own; remove it.",
            ),
            (
                {"sessions": {"environment": {"url": "http://a"}, "sandbox": "Pod"}},
                "spec.sessions.sandbox is Pod, but what has a url runs elsewhere; remove it.",
            ),
            (
                {"sessions": {"environment": {"function": "a:B"}, "sandboxPods": 2}},
                "spec.sessions.sandboxPods has no effect without sandbox: Pod; remove it.",
            ),
            ({"stages": ["sft"]}, "spec.sessions has no effect without ppo in spec.stages; remove it."),
            ({"models.reward": {}}, "spec.sessions plays episodes, which no reward model scores; name a function in"),
            ({"generation.stop": ["!"]}, "spec.generation.stop would end turns without the token that the chat"),
            ({"ppo.routingReplay": True}, "spec.ppo.routingReplay does not know the tokens that tools put into an"),
            (
                {"ppo.dynamicSampling": 1, "ppo.samplesPerPrompt": 2},
                "spec.ppo.dynamicSampling does not know which episodes of a prompt were discarded; set it to 0, or",
            ),
        )
    ),
    (
        {"ppo.routingReplay": True, "groups.1.vllmArgs": ["--no-enable-prefix-caching"]},
        "spec.ppo.routingReplay needs vLLM's prefix cache, which --no-enable-prefix-caching turns off; remove it",
    ),
    ({"groups.1.vllmArgs": ["-pp=2"]}, "spec.groups[1].vllmArgs[0]: -pp is set by Dovetail; remove it."),
    ({"groups.1.name": "trainer"}, "spec.groups[1].name 'trainer' is the name of other processes"),
    (
        {"groups.1.gpu": {"product": "Tesla-V100-SXM2-32GB"}, "groups.1.dtype": "bfloat16"},
        "spec.groups[1].dtype is bfloat16, which Tesla-V100-SXM2-32GB does not have",
    ),
    (
        {"plan.parallelism": {"actor": {"dp": 2, "cp": 4}}},
        "spec.plan.parallelism.actor.cp is 4, which does not divide its 2 data-parallel ranks",
    ),
    (
        {"plan.parallelism": {"actor": {"dp": 4, "cp": 4}, "critic": {"pp": 2, "dp": 2}}, "groups.0.replicas": 4},
        "spec.plan.parallelism.actor.cp is 4, which does not divide its 2 data-parallel ranks (those of one pipeline",
    ),
    (
        {"plan.parallelism": {"actor": {"dp": 2, "ep": 4}}},
        "spec.plan.parallelism.actor.ep is 4, which does not divide its 2 data-parallel ranks",
    ),
    (
        {"plan.parallelism": {"actor": {"dp": 4}, "critic": {"dp": 4, "ep": 3}}, "groups.0.replicas": 4},
        "spec.plan.parallelism.critic.ep is 3, which does not divide its 4 data-parallel ranks",
    ),
    (
        {"plan.parallelism": {"actor": {"dp": 2}, "critic": {"dp": 2, "cp": 3}}},
        "spec.plan.parallelism.critic.cp is 3, which does not divide its 2 data-parallel ranks",
    ),
    (
        {"plan.parallelism": {"actor": {"pp": 3}}},
        "spec.plan.parallelism.actor: pp 3 x tp 1 x dp 1 is 3 ranks, but the trainer groups have 2; make the product",
    ),
    (
        {"plan.parallelism": {"actor": {"dp": 2}, "critic": {"pp": 3}}, "plan.intraStageFusion": "Serial"},
        "spec.plan.parallelism.critic: pp 3 x tp 1 x dp 1 is 3 ranks, but the trainer groups have 2; make the product",
    ),
    (
        {"plan.parallelism": {"actor": {"dp": 4}, "critic": {"pp": 4}}, "groups.0.replicas": 4},
        "spec.plan.parallelism.critic.pp is 4, but the critic has only 2 layers; lower it.",
    ),
    *(
        (
            {"plan.parallelism": {"actor": {"pp": 2}, name: {"pp": 2}}, "plan.intraStageFusion": "VShaped"},
            f"spec.plan.parallelism.{name}.pp is 2, and spec.plan.intraStageFusion VShaped puts two stages of a model",
        )
        for name in ("actor", "critic")
    ),
    *(
        (
            {
                "plan.parallelism": {"actor": {"dp": 2}, "critic": {"dp": 2, "ep": 2}},
                f"models.{name}.lora": {"targetModules": ["experts.down_proj"]},
            },
            f"spec.plan.parallelism.critic.ep is 2, but adapters on experts (spec.models.{name}.lora.target",
        )
        for name in ("critic", "reward")
    ),
    *(
        (
            {"plan.parallelism": {"actor": {"tp": 2}, "critic": {"tp": 2}}, f"models.{name}.lora": {"dropout": 0.1}},
            f"spec.plan.parallelism.critic.tp is 2, but adapters with dropout (spec.models.{name}.lora) are not split",
        )
        for name in ("critic", "reward")
    ),
    (
        {
            "plan.parallelism": {"actor": {"pp": 3, "dp": 2}, "critic": {"pp": 2, "dp": 3}},
            "ppo.globalBatchSize": 48,
            "ppo.miniBatchSize": 48,
            "reward.batchSize": 48,
            "models.actor.source.scratch.config.num_hidden_layers": 6,
            "groups.0.replicas": 6,
        },
        "the actor's pp 3 and the critic's pp 2 do not divide each other, so their pipelines cannot share a schedule; "
        "make the lower one of 1, 3, or set spec.plan.intraStageFusion to Serial.",
    ),
    (
        {"plan.parallelism": {"actor": {"pp": 4}}, "groups.0.replicas": 4},
        "spec.plan.parallelism.actor.pp is 4, but the actor has only 2 layers; lower it.",
    ),
    (
        {"models.actor.source.scratch.config.max_position_embeddings": 600},
        "spec.data.maxPromptTokens + spec.generation.maxTokens is 1024, but the actor has max_position_embeddings 600",
    ),
    (
        {"models.actor.source.scratch.config.max_position_embeddings": 600},
        "spec.data.maxTokens is 1024, but the actor has max_position_embeddings 600",
    ),
    (
        {"models.actor.source.scratch.config.head_dim": 16},
        "spec.models.actor.source.scratch.config: the actor's attention heads have 16 dimensions (hidden_size / "
        "num_attention_heads); vLLM on CPUs takes 32, 64, 80,",
    ),
    (
        {"models.actor.source.scratch": {"architecture": "deepseek_v3"}},
        "spec.models.actor.source.scratch.architecture: vLLM on CPUs computes neither latent keys and values nor",
    ),
]
