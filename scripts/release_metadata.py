"""Make pyproject.toml ready for a release: python3 scripts/release_metadata.py --tag v0.1.0 --repository ADDRESS.

Refuse a tag that is not the version, and write the project's addresses, which depend on where the repository lies.
"""

import argparse
import re
import sys
import tomllib
from pathlib import Path


def with_urls(pyproject: str, repository: str) -> str:
    """Return the text of pyproject.toml with the addresses of `repository` as `[project.urls]`."""
    urls = {
        "Homepage": repository,
        "Documentation": f"{repository}/tree/main/docs",
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }
    lines = "".join(f'{name} = "{url}"\n' for name, url in urls.items())
    return pyproject.replace("[project.scripts]", f"[project.urls]\n{lines}\n[project.scripts]", 1)


def main() -> int:
    """Return 1, with one line on standard error, if the tag or the address cannot be used."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", required=True, help="v and the version")
    parser.add_argument("--repository", required=True, help="https address of the repository")
    parser.add_argument("--file", type=Path, default=Path("pyproject.toml"))
    args = parser.parse_args()

    text = args.file.read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    if args.tag != f"v{project['version']}":
        print(f"release: tag {args.tag}, but {args.file} has version {project['version']}", file=sys.stderr)
        return 1
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+){2}", args.repository):
        print(f"release: {args.repository}: not like https://HOST/OWNER/NAME", file=sys.stderr)
        return 1
    if "urls" in project:
        print(f"release: {args.file} has [project.urls] already", file=sys.stderr)
        return 1
    args.file.write_text(with_urls(text, args.repository.rstrip("/")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
