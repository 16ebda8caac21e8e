"""An agent program: it knows nothing but OPENAI_BASE_URL and OPENAI_API_KEY, and prints its reward at the end.

environment: {play: program, arguments: {command: [python3, examples/agents/agent.py]}}
"""

import json
import os
import sys
import urllib.request


def chat(messages):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    asked = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["choices"][0]["message"]


task = json.load(sys.stdin)
messages, right = task["prompt"], False
for _ in range(3):
    message = chat(messages)
    right = message["content"].strip() == task["facts"]["answer"]
    if right:
        break
    messages += [message, {"role": "user", "content": "No. Again?"}]
print(json.dumps({"reward": float(right), "parts": {"length": len(messages)}}))
