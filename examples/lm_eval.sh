#!/bin/sh
# lm-evaluation-harness scores a served model by the log-probabilities of its answers' tokens.
#
# Needs `pip install 'lm_eval[api]'`, and a network for the task's data. Start `outrider serve MODEL`,
# then: sh examples/lm_eval.sh http://127.0.0.1:8000 MODEL lambada_openai [--limit NUMBER]
set -eu
url=$1 model=$2 task=$3
shift 3
exec lm_eval run --model local-completions --tasks "$task" --batch_size 1 --model_args \
    "model=$model,base_url=$url/v1/completions,tokenizer_backend=remote,tokenized_requests=True" "$@"
