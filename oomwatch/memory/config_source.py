import json
from oomwatch.memory.model_config import parse_config
def load_model(path, name):
    return parse_config(json.load(open(path)))
