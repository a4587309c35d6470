# SPDX-License-Identifier: Apache-2.0
"""Word material: common English words, first names and made-up words."""

from __future__ import annotations

import random

_COMMON = """
amber anchor apple april arrow autumn badge bamboo banana basin basket beacon bench berry birch
bishop blanket blossom bottle branch bread breeze bridge bronze brush bucket butter button cabin
cactus camel candle canyon carbon carpet castle cedar chalk cheese cherry chess circle cliff
cloud clover coast cobalt coffee comet copper coral cotton crane crater cricket crystal dagger
daisy dance dawn deer delta desert diamond dragon drum dune eagle earth echo ember engine falcon
feather fern field finch flame flint flute forest fossil fountain fox frost garden garlic ginger
glacier glass globe grain grape gravel guitar hammer harbor harp hazel helmet heron hill hollow
honey horn horse island ivory jacket jasmine jungle kernel kettle kitten ladder lagoon lamp
lantern laurel lemon leopard letter lily linen lizard lotus magnet mango maple marble marsh
meadow melon mercury mirror mist mitten monkey moon moss motor mountain mouse mustard needle
nettle north oak oasis ocean olive onion opal orange orbit orchid otter owl oyster paddle palace
panther paper parrot pasta peach pearl pebble pencil pepper piano pigeon pillow pine pirate
planet plum pocket poem pond poppy potato prism pumpkin puzzle quartz quill rabbit radar rain
raven ribbon ridge river robin rocket rose ruby saddle saffron salmon sand sapphire satin scarf
season shadow shell silver sky smoke snow socket spark sparrow spice spider spoon spring
spruce star stone storm straw stream sugar summer sunset swan table teapot temple thistle
thunder tiger timber tomato torch tower train treasure tulip tunnel turtle valley vanilla velvet
vessel village violet violin wagon walnut water wave whale wheat whistle willow window winter
wolf wood yarrow yellow zebra zinc
"""
COMMON: tuple[str, ...] = tuple(_COMMON.split())

_NAMES = """
Ada Alan Amir Anna Ben Bruno Carla Chen Clara Dana Dario Diego Elena Emil Erik Eva Farah Felix
Fiona Gita Greta Hana Hugo Ida Igor Ines Ivan Jana Jonas Julia Kai Karim Kira Lars Leila Lena
Leo Lina Luca Maja Mara Marco Maria Milo Mina Nadia Nico Nina Noah Olga Omar Oscar Paula Pedro
Petra Priya Rafael Rosa Ruth Samir Sara Selma Silas Sofia Stefan Tara Theo Tomas Uma Vera Viktor
Wanda Yara Yusuf Zara Zoe
"""
NAMES: tuple[str, ...] = tuple(_NAMES.split())

_ONSETS = """
b bl br c ch cl cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sh sk sl st t th tr v w x y z
"""
_VOWELS = "a e i o u ai ea ee oo ou"
_CODAS = "b ck d g l ll m n nd p r rn s ss st t x"
ONSETS: tuple[str, ...] = tuple(_ONSETS.split())
VOWELS: tuple[str, ...] = tuple(_VOWELS.split())
CODAS: tuple[str, ...] = ("", "", "", *_CODAS.split())
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def made_up(rng: random.Random, low: int = 3, high: int = 8) -> str:
    """Return a pronounceable made-up word of `low` to `high` letters."""
    while True:
        word = "".join(
            rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
            for _ in range(rng.choice((1, 2, 2)))
        )
        if low <= len(word) <= high:
            return word


def word(rng: random.Random, low: int = 3, high: int = 8) -> str:
    """Return a common word, a made-up word or (rarely) a random letter string."""
    kind = rng.random()
    if kind < 0.45:
        while True:
            choice = rng.choice(COMMON)
            if low <= len(choice) <= high:
                return choice
    if kind < 0.9:
        return made_up(rng, low, high)
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(low, min(high, 7))))


def proper_name(rng: random.Random) -> str:
    """Return a first name, real or made up."""
    return rng.choice(NAMES) if rng.random() < 0.5 else made_up(rng, 3, 7).capitalize()


def code(rng: random.Random) -> str:
    """Return a short alphanumeric such as `k7` or `ab12`."""
    letters = "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 3)))
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 3)))
    return letters + digits
