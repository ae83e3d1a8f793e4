"""Plain English, written for this book, that trained models read: passages, and pairs that say the same."""

from __future__ import annotations

_PASSAGES = """
When the rain stopped, the children ran out of the house and down to the river. The water was high and brown, and it
carried branches and leaves toward the bridge at the end of the village.

She put the kettle on the stove and sat down at the table by the window. The letter had come in the morning, but she
had not opened it yet, because she knew what it would say.

Bread is made from flour, water, salt and yeast. The dough is kneaded for ten minutes and left in a warm place for
an hour, until it is about twice as large as it was before.

The moon goes around the earth once a month. It has no light of its own; what we see at night is the light of the
sun, which falls on one side of it.

My grandfather was a doctor in a small town in the north of the country. Every morning he got up at five, drank a
cup of black coffee and went out to see the people who were sick.

Most birds that live in cold countries fly south in the autumn and come back in the spring. They find their way by
the stars, by the sun and by the shape of the land.

The train was late, as it was every Monday, and the people on the platform looked at their watches and then at each
other. Nobody said a word until the doors opened.

In the United States, the president is elected every four years. A person who wants to be president must be at least
thirty-five years old and must have been born in the country.

The old man had a dog that followed him everywhere he went. One day the dog did not come back from the woods, and
the old man waited at the door all night long.

If you want to learn to play the piano, you should practice a little every day. It is better to play for half an
hour each morning than for four hours once a week.

The first thing that you see when you come into the city is the tower of the church. It was built more than five
hundred years ago, and it can be seen from far away.

Water freezes at zero degrees and boils at one hundred degrees. When it freezes it takes up more room than before,
which is why a bottle of water breaks if you leave it out in the cold.

He had been working in the same office for twenty years, and he knew the name of every person in the building. On
his last day they gave him a watch and a book about fishing.

The wind blew hard all night, and in the morning there were leaves all over the street. A tree had fallen across the
road, and no cars could get through until the afternoon.

There are seven days in a week and twelve months in a year. February is the shortest month of the year, with twenty-
eight days, or twenty-nine days once every four years.

At the market you can buy apples, potatoes, eggs and fresh fish. The people who sell them come from the farms around
the town, and they start to set up their tables before the sun rises.
"""

# Passages of 32 tokens or more of SmolLM2's tokenizer.
ENGLISH: list[str] = [" ".join(passage.split()) for passage in _PASSAGES.split("\n\n")]

# A sentence, and another one that says the same in other words.
PARAPHRASES: list[tuple[str, str]] = [
    (
        "The train to the coast leaves at nine in the morning.",
        "At nine a.m. there is a train that goes to the seaside.",
    ),
    ("My brother has bought a new car.", "My brother got himself a new automobile."),
    ("The doctor told her to stay in bed for a week.", "She was ordered by her physician to rest for seven days."),
    ("It has not rained here since the spring.", "There has been no rain in this place since spring."),
    ("He lost his keys on the way home from work.", "On his way back from the office his keys went missing."),
    ("The museum is closed on Mondays.", "You cannot visit the museum on a Monday."),
    ("She learned to swim when she was four years old.", "At the age of four she was taught how to swim."),
    ("The soup is too salty to eat.", "Nobody can eat this soup, there is too much salt in it."),
    ("Our neighbours are moving to Spain next month.", "Next month the people next door will go to live in Spain."),
    ("The bank refused to lend them the money.", "They did not get the loan from the bank."),
    ("A dog bit the postman in the leg yesterday.", "Yesterday the mail carrier was bitten in his leg by a dog."),
    (
        "The bridge was destroyed in the war and never rebuilt.",
        "Nobody rebuilt the bridge after the war had destroyed it.",
    ),
    ("The teacher praised the girl for her drawing.", "The girl's picture was praised by her teacher."),
    ("Prices of bread have doubled within a year.", "Bread costs twice as much as it did a year ago."),
    (
        "The team won the final by a single goal.",
        "With just one goal more than the other side they won the final match.",
    ),
    ("He speaks four languages without any accent.", "Without an accent he can talk in four different languages."),
]
