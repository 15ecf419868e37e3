"""What the ports for Transformers share: made-up sentences, their tokenizer, a tiny BERT."""

import random

from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

GOOD, BAD = ["fine", "great", "lovely"], ["awful", "dull", "poor"]
OTHER = ["a", "film", "the", "story", "was", "and", "actors", "it", "with", "very"]


def get_tokenizer():
    """Return a tokenizer that needs no download."""
    words = ["[PAD]", "[UNK]", *GOOD, *BAD, *OTHER]
    model = Tokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]"))
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="[PAD]", unk_token="[UNK]")


def load_reviews(size, seed):
    """Return sentences of unlike lengths, tokenized, and whether they are more good than bad."""
    draw = random.Random(seed)
    texts, labels = [], []
    for _ in range(size):
        label = draw.randrange(2)
        marks = [draw.choice(GOOD if label else BAD) for _ in range(2)]
        marks.append(draw.choice(BAD if label else GOOD))
        words = marks + draw.choices(OTHER, k=draw.randrange(3, 15))
        draw.shuffle(words)
        texts.append(" ".join(words))
        labels.append(label)
    return Dataset.from_dict({**get_tokenizer()(texts), "label": labels})


def make_model(hidden):
    """Return a BERT of one layer, with weights that are drawn at random."""
    config = BertConfig(
        vocab_size=len(get_tokenizer()),
        hidden_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=2 * hidden,
        max_position_embeddings=32,
        num_labels=2,
    )
    return BertForSequenceClassification(config)
