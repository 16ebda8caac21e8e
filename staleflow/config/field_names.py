"""Names of settings in TRL, verl, prime-rl and Hugging Face's ``TrainingArguments``, and what they are here.

A user who comes from there types them from memory. The value ends the sentence "NAME is unknown: ...". ::

    elsewhere("training.gradient_accumulation_steps")   # "a step is always cut into micro-batches of ..."
    elsewhere("trainer.total_epochs")                   # "write data.epochs, or steps"
"""

import re

GROUPS = "write groups (prompts of a step); a step trains groups x group_size responses"
RANKS = "write training.ranks, the processes that share the model (FSDP2)"
OFFLOADED = "write training.offload_moments"
ACCUMULATION = "a step is always cut into micro-batches and their gradients added: write training.micro_tokens"
DEVICES = "write groups for the size of a step, training.ranks for the processes that share the trainer's model"
MIXED = "on a GPU the trainer computes in bfloat16 anyway: write rollout.dtype for the engine"
CHECKPOINTS = "write checkpoints.every (steps) or checkpoints.minutes"
EVERY_STEP = "every step is printed and written to metrics.jsonl: leave it out"
TRACKERS = "write track=wandb, tensorboard, trackio or prometheus; metrics.jsonl of the run directory has all of it"
ENGINE = "rollout has its own engine, chosen by rollout.engine: leave it out"
BOUND = "write staleness: no token is trained on more than this many updates after the version that made it"
MODEL = "write model, a folder or OWNER/NAME on the hub"
REWARDS = "write reward.function, a name or module:function, or several as a list"
KL = "write training.kl_coefficient, the weight of the divergence from the first model"

ELSEWHERE = {
    # Size and number of steps
    "per_device_train_batch_size": DEVICES,
    "train_batch_size": GROUPS,
    "batch_size": GROUPS,
    "rollout_batch_size": GROUPS,
    "prompts_per_step": GROUPS,
    "gradient_accumulation_steps": ACCUMULATION,
    "micro_batch_size": ACCUMULATION,
    "ppo_micro_batch_size": ACCUMULATION,
    "ppo_micro_batch_size_per_gpu": ACCUMULATION,
    "ppo_max_token_len_per_gpu": "write training.micro_tokens",
    "use_dynamic_bsz": "micro-batches are always filled by tokens: write training.micro_tokens",
    "ppo_mini_batch_size": "write training.updates_per_step, the mini-batches of a step",
    "num_iterations": "write training.updates_per_step",
    "ppo_epochs": "a step is trained on once, in training.updates_per_step mini-batches: leave it out",
    "max_steps": "write steps",
    "num_steps": "write steps",
    "total_training_steps": "write steps",
    "num_train_epochs": "write steps, or data.epochs for how often the data is read",
    "total_epochs": "write steps, or data.epochs for how often the data is read",
    "num_generations": "write group_size, the responses to each prompt",
    "rollouts_per_example": "write group_size, the responses to each prompt",
    "rollout.n": "write group_size, the responses to each prompt",
    "generation_batch_size": GROUPS,
    # Lengths and sampling
    "max_completion_length": "write rollout.max_tokens",
    "max_new_tokens": "write rollout.max_tokens",
    "max_response_length": "write rollout.max_tokens",
    "response_length": "write rollout.max_tokens",
    "max_prompt_length": "write data.max_prompt_tokens; longer prompts are left out",
    "prompt_length": "write data.max_prompt_tokens; longer prompts are left out",
    "max_seq_len": "write rollout.max_tokens and data.max_prompt_tokens",
    "max_model_len": "write rollout.max_tokens and data.max_prompt_tokens",
    "stop": "write rollout.stop_strings, a list",
    # The loss
    "beta": KL,
    "kl_coef": KL,
    "kl_loss_coef": KL,
    "kl_penalty": KL,
    "use_kl_loss": KL,
    "ref_model": KL,
    "sync_ref_model": "the reference stays the model that the run began with: leave it out",
    "epsilon": "write training.eps_low and training.eps_high",
    "epsilon_low": "write training.eps_low",
    "epsilon_high": "write training.eps_high",
    "clip_ratio": "write training.eps_low and training.eps_high",
    "clip_ratio_low": "write training.eps_low",
    "clip_ratio_high": "write training.eps_high",
    "cliprange": "write training.eps_low and training.eps_high",
    "clip_ratio_c": "write training.dual_clip",
    "entropy_coeff": "write training.entropy_coefficient",
    "loss_type": "write training.loss and training.advantage",
    "adv_estimator": "write training.advantage",
    "loss_agg_mode": "write training.aggregation",
    "scale_rewards": "write training.advantage=dr_grpo for advantages that are not divided by the deviation",
    "norm_adv_by_std_in_grpo": "write training.advantage=dr_grpo for advantages that are not divided by the deviation",
    "importance_sampling_level": "write training.loss=gspo for ratios of whole responses",
    "tis_imp_ratio_cap": "write training.correction=truncated and training.importance_cap",
    "mask_truncated_completions": "write training.overlong_buffer and training.overlong_penalty",
    "lam": "write training.gae_lambda",
    # The optimiser and the model
    "lr": "write training.learning_rate",
    "optim.lr": "write training.learning_rate",
    "lr_scheduler_type": "write training.schedule",
    "warmup_ratio": "write training.warmup_steps, a number of steps",
    "lr_warmup_steps": "write training.warmup_steps",
    "max_grad_norm": "write training.clip_norm",
    "grad_clip": "write training.clip_norm",
    "adam_beta1": "write training.betas, a list of two",
    "adam_beta2": "write training.betas, a list of two",
    "optim": "the optimiser is AdamW: leave it out",
    "optimizer": "the optimiser is AdamW: leave it out",
    "bf16": MIXED,
    "fp16": MIXED,
    "torch_dtype": MIXED,
    "gradient_checkpointing": "write training.activation_checkpointing",
    "enable_gradient_checkpointing": "write training.activation_checkpointing",
    "lora_r": "write training.lora_rank",
    "peft_config": "write training.lora_rank, training.lora_alpha and training.lora_targets",
    "use_peft": "write training.lora_rank above 0",
    "target_modules": "write training.lora_targets",
    "model_name": MODEL,
    "model_name_or_path": MODEL,
    "model.path": MODEL,
    "output_dir": "write runs, the folder of run directories",
    "default_local_dir": "write runs, the folder of run directories",
    "resume_from_checkpoint": "continue a run with staleflow train --resume RUN",
    "resume_mode": "continue a run with staleflow train --resume RUN",
    "deepspeed": RANKS,
    "fsdp": RANKS,
    "optimizer_offload": OFFLOADED,
    "offload_optimizer": OFFLOADED,
    "nnodes": "nodes are those of the Ray cluster: write runtime=ray and ray.address, or leave it out",
    "n_gpus_per_node": "GPUs are those of the Ray cluster: write runtime=ray and ray.address, or leave it out",
    # Rollout
    "use_vllm": ENGINE,
    "vllm_mode": ENGINE,
    "rollout.name": ENGINE,
    "tensor_parallel_size": "an instance uses one device: leave it out, or plan with cluster.gpus_per_instance",
    "tensor_parallel": "an instance uses one device: leave it out, or plan with cluster.gpus_per_instance",
    "tensor_model_parallel_size": "an instance uses one device: leave it out, or plan with cluster.gpus_per_instance",
    "gpu_memory_utilization": "write rollout.kv_tokens, the tokens that an instance keeps in memory",
    "vllm_gpu_memory_utilization": "write rollout.kv_tokens, the tokens that an instance keeps in memory",
    "max_num_seqs": "write rollout.max_running",
    "max_num_batched_tokens": "write rollout.prefill_tokens",
    # Staleness
    "max_off_policy_steps": BOUND,
    "max_async_level": BOUND,
    "max_off_policy_level": BOUND,
    "async_level": BOUND,
    "staleness_threshold": BOUND,
    "max_head_offpolicyness": BOUND,
    "max_staleness": BOUND,
    "bound": BOUND,
    # Data, rewards, evaluation
    "dataset": "write data.source",
    "dataset_name": "write data.source",
    "train_dataset": "write data.source",
    "train_files": "write data.source",
    "val_files": "write data.held_out",
    "eval_dataset": "write data.held_out",
    "prompt_key": "write data.prompt, the name of the column",
    "system_prompt": "write data.system",
    "apply_chat_template": "write data.chat",
    "filter_overlong_prompts": "longer prompts than data.max_prompt_tokens are left out anyway: leave it out",
    "reward_funcs": REWARDS,
    "reward_function": REWARDS,
    "reward_model": REWARDS,
    "custom_reward_function": REWARDS,
    "reward_weights": "write reward.weights",
    "filter_groups": "write filter=no-signal",
    "dynamic_sampling": "write filter=no-signal",
    "eval_steps": "write evaluation.every",
    "test_freq": "write evaluation.every",
    "val_before_train": "a run is always evaluated before its first step: leave it out",
    "num_generations_eval": "write evaluation.samples",
    "early_stopping_patience": "write evaluation.patience",
    "load_best_model_at_end": "write checkpoints.best; the best version is kept in checkpoints/best",
    "metric_for_best_model": "write evaluation.figure",
    # Saving and logging
    "save_steps": CHECKPOINTS,
    "save_freq": CHECKPOINTS,
    "save_interval": CHECKPOINTS,
    "save_strategy": CHECKPOINTS,
    "save_total_limit": "write checkpoints.keep",
    "max_actor_ckpt_to_keep": "write checkpoints.keep",
    "logging_steps": EVERY_STEP,
    "log_completions": "write samples, the responses of each step that are kept; staleflow samples RUN shows them",
    "report_to": TRACKERS,
    "wandb": TRACKERS,
    "tensorboard": TRACKERS,
    "logger": TRACKERS,
    "run_name": "a run is named after its file and time: leave it out",
    "push_to_hub": "checkpoints are in Hugging Face format: upload one with hf upload",
}


def elsewhere(dotted: str) -> str | None:
    """What a setting of another system is here; None if no system is known to call one so."""
    plain = re.sub(r"[^a-z0-9.]+", "_", dotted.lower().strip("-_ "))
    parts = plain.split(".")
    return ELSEWHERE.get(".".join(parts[-2:])) or ELSEWHERE.get(parts[-1])
