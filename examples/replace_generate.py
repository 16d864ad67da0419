"""`model.generate` of transformers replaced: the same arguments, the same ids, by speculation.

python examples/replace_generate.py        (needs `pip install '.[hf]'` in a checkout)
"""

from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider import LLM
from outrider.transformers_compat import generate

PROMPTS = ["def quicksort(items):", "class Stack:\n    def __init__(self):"]

llm = LLM(dtype="float32")  # a folder or a hub id does in its place
tokenizer = AutoTokenizer.from_pretrained(llm.folder, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}

model = AutoModelForCausalLM.from_pretrained(llm.folder, dtype="float32")
before = model.generate(**inputs, **options)
after = generate(llm, **inputs, **options)

for text in tokenizer.batch_decode(after, skip_special_tokens=True):
    print(text, "\n---")
print("the same ids:", before.tolist() == after.tolist())
