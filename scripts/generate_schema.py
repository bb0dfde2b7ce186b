"""Generate the wire types, method table and handler classes; see `schema_generator`.

python scripts/generate_schema.py           write the files
python scripts/generate_schema.py --check   fail where one is out of date
python scripts/generate_schema.py --fetch   only have the official files at hand
"""

from schema_generator.command import main

if __name__ == "__main__":
    raise SystemExit(main())
