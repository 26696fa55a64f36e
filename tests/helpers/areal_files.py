"""AReaL-style configs of both eras, written here from the list of its keys."""

# The time of `areal.launcher.*`: allocation_mode, group_size, weight cap, launcher.
OLD = """
experiment_name: migrate
trial_name: first
seed: 3
total_train_epochs: 2
tokenizer_path: ${actor.path}
async_training: true
allocation_mode: sglang.d2p1t1+d2p1t1
cluster:
  n_nodes: 1
  n_gpus_per_node: 4
  fileroot: /data/runs
  name_resolve: {type: nfs, nfs_record_root: /data/names}
rollout:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  max_concurrent_rollouts: 128
  queue_size: null
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 3
  enable_rollout_tracing: false
gconfig:
  n_samples: 4
  max_new_tokens: 256
  min_new_tokens: 0
  greedy: false
  temperature: 0.9
actor:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  path: some/model
  init_from_scratch: false
  disable_dropout: true
  gradient_checkpointing: false
  dtype: bfloat16
  backend: fsdp
  mb_spec: {max_tokens_per_mb: 4096}
  optimizer: {type: adam, lr: 2e-5, weight_decay: 0.02, eps: 1e-8, gradient_clipping: 1.0}
  group_size: ${gconfig.n_samples}
  eps_clip: 0.3
  temperature: ${gconfig.temperature}
  reward_scaling: 2.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 2
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 4.0
  dynamic_sampling: false
  reward_norm: {mean_level: group, std_level: group, group_size: '${gconfig.n_samples}'}
  adv_norm: {mean_level: batch, std_level: batch}
  max_new_tokens: ${gconfig.max_new_tokens}
ref:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  path: ${actor.path}
  init_from_scratch: false
  dtype: ${actor.dtype}
  mb_spec: {max_tokens_per_mb: 4096}
  optimizer: null
  backend: fsdp
sglang:
  model_path: ${actor.path}
  random_seed: ${seed}
  mem_fraction_static: 0.7
train_dataset: {batch_size: 64, shuffle: true, pin_memory: true, num_workers: 2, path: openai/gsm8k, type: rl}
valid_dataset: {batch_size: 64, pin_memory: true, num_workers: 2, path: openai/gsm8k, type: rl}
saver:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  fileroot: ${cluster.fileroot}
  freq_epochs: 1
recover:
  mode: disabled
  fileroot: ${cluster.fileroot}
  freq_secs: 1800
  retries: 3
evaluator: {experiment_name: '${experiment_name}', freq_epochs: 1, freq_steps: null}
stats_logger: {fileroot: '${cluster.fileroot}', wandb: {mode: disabled}}
launcher: {trainer_cpus_per_gpu: 4, inference_server_mem_per_gpu: 1024}
"""

# The time of `scheduler.type`: backends by name, rejection_sampling, scheduling_spec, perf_tracer.
NEW = """
experiment_name: migrate
trial_name: second
enable_offload: false
total_train_epochs: 2
tokenizer_path: ${actor.path}
cluster: {n_nodes: 1, n_gpus_per_node: 4, fileroot: /data/runs}
scheduler: {type: null}
rollout:
  backend: "vllm:d2p1t1"
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  max_head_offpolicyness: 2
  scheduling_spec: ${actor.scheduling_spec}
  fileroot: ${cluster.fileroot}
  tokenizer_path: ${tokenizer_path}
  setup_timeout: 300
gconfig: {n_samples: 4, max_new_tokens: 256, temperature: 1.0, top_k: 100000000}
actor:
  backend: "fsdp:d2p1t1"
  experiment_name: ${experiment_name}
  path: some/model
  attn_impl: sdpa
  eps_clip: 0.3
  recompute_logprob: true
  use_decoupled_loss: true
  prox_logp_method: metrics
  weight_update_mode: xccl
  rejection_sampling: {metric: ratio, upper: 4.0}
  reward_norm: {mean_level: group, std_level: group, group_size: '${gconfig.n_samples}'}
  importance_sampling_level: sequence
  peft_type: lora
  scheduling_spec:
    - {task_type: worker, gpu: 1, mem: 32, cmd: run, env_vars: {}}
ref:
  backend: ${actor.backend}
  path: ${actor.path}
  optimizer: null
  scheduling_strategy: {type: colocation, target: actor}
  scheduling_spec: ${actor.scheduling_spec}
vllm: {model: '${actor.path}', max_model_len: 4096}
train_dataset: {batch_size: 64, num_workers: 2, path: openai/gsm8k, type: rl}
recover: {mode: on, experiment_name: '${experiment_name}'}
evaluator: {eval_before_train: true}
stats_logger: {tensorboard: {path: null}, swanlab: {mode: disabled}, wandb: {mode: disabled, entity: me}}
perf_tracer: {experiment_name: '${experiment_name}', enabled: false, session_tracer: {enabled: false}}
"""
