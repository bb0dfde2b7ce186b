"""Generate the wire types, method table and handler classes; see `schema_generator`.

python scripts/generate_schema.py           write the files
python scripts/generate_schema.py --check   fail where one is out of date
"""

from schema_generator.command import main

if __name__ == "__main__":
    raise SystemExit(main())
