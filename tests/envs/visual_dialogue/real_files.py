"""Write files in the layouts of the real dataset, without the code under test."""

import json

import numpy as np

CAPTION = "two zebras grazing in a field"
FEATURES = 4096


def write_dialogues(path, many, *, change=None):
    """Dialogues with candidate answers, as VisDial 0.5 has them; ``change(items)`` damages them."""
    items, unused = [], {"gt_index": 17, "options": ["yes", "no", "maybe"]}
    for number in range(many):
        answers = [f"i can't tell {number}", "yes"] * 5
        rounds = [{"question": f"is it sunny in round {n}", "answer": text} for n, text in enumerate(answers)]
        rounds[9]["question"] += "?"  # some have their question mark already
        dialog = [each | unused for each in rounds]
        items.append({"image_id": 378461 + number, "caption": f"{CAPTION} {number}", "dialog": dialog})
    if change is not None:
        change(items)
    path.write_text(json.dumps(items))
    return path


def write_numbered(path, many, *, change=None):
    """The same dialogues as VisDial 1.0 has them: every text once, and rounds with the numbers of theirs."""
    items = json.loads(write_dialogues(path, many).read_text())
    texts = {"question": ["what"], "answer": ["nothing"]}
    for each in (each for item in items for each in item["dialog"]):
        each["answer_options"] = each.pop("options")
        for kind, known in texts.items():
            if each[kind] not in known:
                known.insert(0, each[kind])
    for each in (each for item in items for each in item["dialog"]):
        each.update({kind: known.index(each[kind]) for kind, known in texts.items()})
        each["answer_options"] = [texts["answer"].index("nothing")] * 3
    data = {"questions": texts["question"], "answers": texts["answer"], "dialogs": items}
    if change is not None:
        change(data)
    path.write_text(json.dumps({"version": "1.0", "split": "train", "data": data}))
    return path


def raw_features(many, size=FEATURES, seed=0):
    """Like fc7 of VGG-19: not negative, half of it zero, not normalised."""
    return np.maximum(np.random.default_rng(seed).normal(size=(many, size)), 0).astype(np.float32)


def write_hdf5(path, **splits):
    import h5py

    with h5py.File(path, "w") as file:
        for split, array in splits.items():
            file[f"images_{split}"] = array
    return path


def write_rewards(path, many, *, first=0.6, later=0.0625):
    path.write_text(json.dumps([[first, *[later] * 10] for _ in range(many)]))
    return path
