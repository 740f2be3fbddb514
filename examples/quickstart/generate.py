"""Continue a prompt greedily with a Hugging Face folder: shows that an exported student loads and generates text.

python examples/quickstart/generate.py --hf runs/quickstart/student-kd --prompt "The with statement is used to"
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


@torch.inference_mode()
def continuation(folder: str, prompt: str, new_tokens: int) -> str:
    """The prompt and its continuation."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, trust_remote_code=False
    )
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    # A model this small repeats itself without a penalty.
    output = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, repetition_penalty=1.2)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", required=True, metavar="DIR", help="Hugging Face folder")
    parser.add_argument("--prompt", required=True, help="beginning of the text")
    parser.add_argument("--new-tokens", type=int, default=40, metavar="N", help="tokens to generate (40)")
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(f"{args.hf}: {continuation(args.hf, args.prompt, args.new_tokens)}")


if __name__ == "__main__":
    main()
