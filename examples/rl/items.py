"""The items that both tasks ask for, in three sets without a common one."""

ITEMS = [
    "apple", "banana", "bread", "butter", "candle", "carrot", "chair", "cheese", "clock", "coat", "coffee",
    "cookie", "cup", "desk", "door", "dress", "egg", "fish", "flour", "fork", "glass", "glove", "grape",
    "guitar", "hammer", "hat", "honey", "jacket", "jam", "juice", "kettle", "key", "knife", "ladder", "lamp",
    "lemon", "map", "melon", "milk", "mirror", "mug", "nail", "oil", "onion", "orange", "oven", "paint", "pan",
    "paper", "peach", "pear", "pen", "pencil", "pepper", "phone", "piano", "pillow", "plate", "potato", "radio",
    "rice", "ring", "rope", "rug", "salt", "scarf", "shirt", "shoe", "soap", "sofa", "soup", "spoon", "sugar",
    "table", "tea", "tent", "tomato", "towel", "train", "umbrella", "vase", "violin", "watch", "water", "wheel",
    "window",
]  # fmt: skip
HELD_OUT = ITEMS[1::3]
DEMONSTRATED = [item for item in ITEMS[0::8] if item not in HELD_OUT]
TRAINED = [item for item in ITEMS if item not in DEMONSTRATED and item not in HELD_OUT]
"""Three sets without a common item: those of the cold start, of the steps, and of the measurement."""
