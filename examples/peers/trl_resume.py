"""A run of TRL's GRPOTrainer on a tiny model, which writes what each step was trained on.
docs/how-to/peer-resume.md uses it.

python trl_resume.py FOLDER                   12 steps
python trl_resume.py FOLDER --kill-after 6    kills itself when the checkpoint of step 6 is written
python trl_resume.py FOLDER                   resumes from that checkpoint
"""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

CHARACTERS = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz0123456789 "]


class KillAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Recorded(GRPOTrainer):
    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        with Path(self.args.output_dir, "trained.jsonl").open("a") as trained:
            for prompt, completion in zip(inputs["prompt_ids"], inputs["completion_ids"], strict=True):
                text = [self.processing_class.decode(ids, skip_special_tokens=True) for ids in (prompt, completion)]
                row = {"step": self.state.global_step + 1, "prompt": text[0], "completion": text[1]}
                trained.write(json.dumps(row) + "\n")
        return inputs


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: number for number, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def tiny_model() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(CHARACTERS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
    )


def length(completions: list[str], **_: Any) -> list[float]:
    return [float(len(completion)) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-after", type=int, default=0, metavar="STEP")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    trainer = Recorded(
        model=tiny_model(),
        reward_funcs=length,
        # A generation is learnt from in four steps. The checkpoint of step 6 stands in the middle of one.
        args=GRPOConfig(
            output_dir=str(chosen.folder),
            max_steps=12,
            save_steps=6,
            steps_per_generation=4,
            gradient_accumulation_steps=1,
            per_device_train_batch_size=16,
            num_generations=4,
            max_completion_length=12,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            seed=0,
        ),
        train_dataset=Dataset.from_list([{"prompt": f"prompt number {number}"} for number in range(48)]),
        processing_class=tiny_tokenizer(),
        callbacks=[KillAfter(chosen.kill_after)],
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(chosen.folder)))


if __name__ == "__main__":
    main()
