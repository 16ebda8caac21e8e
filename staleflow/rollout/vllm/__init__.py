"""vLLM as a rollout engine, unpatched: its synchronous ``LLMEngine`` in this process, one step at a time.

Weights and requests change between two steps and nowhere else. So every token of a step was made by the version that
is held then, and the spans made here are exact. This is why asynchronous scheduling is off: with it, a batch is under
way between two steps, and its tokens would be stamped with weights that did not make them.

``start`` makes an engine, ``engine`` drives it, ``requests`` is what it holds, ``weights`` is our backend of its weight
transfer, ``scheduler`` counts. What is touched of vLLM has the same names in 0.26 and in 0.32. ::

    engine = make("models/tiny", EngineOptions(kv_tokens=65_536), tensor_parallel_size=2)
    engine.submit([Request("t1", 1, prompt=[5, 8, 13])])

This package sets vLLM's environment, which is read when vLLM is imported: import it first.
"""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
for _name, _value in {
    "VLLM_LOGGING_LEVEL": "ERROR",  # among its warnings are some for each pull
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # instances share the cores with each other and the trainer
}.items():
    os.environ.setdefault(_name, _value)
