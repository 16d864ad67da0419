"""Payloads that would be markup or script anywhere but in text: sixty, none from a file."""

from __future__ import annotations

from collections.abc import Iterator

# What each runs where it runs at all: the test sees the dialog.
_RUN = "alert(1)"
_TAGS = (
    "<script>{run}</script>",
    "<ScRiPt>{run}</sCrIpT>",
    '<script src="//evil.example/x.js"></script>',
    "<script type=module>{run}</script>",
    "<img src=x onerror={run}>",
    "<img/src=x/onerror={run}>",
    '<img src="https://evil.example/p.png">',
    "<image href=x onerror={run}>",
    "<svg onload={run}>",
    "<svg><script>{run}</script></svg>",
    "<svg><animate onbegin={run} attributeName=x dur=1s>",
    "<svg><a href='javascript:{run}'><text y=9>x</text></a></svg>",
    "<svg><use href='data:image/svg+xml,<svg onload={run}>'></svg>",
    "<math><mtext><script>{run}</script></mtext></math>",
    "<iframe src='javascript:{run}'></iframe>",
    "<iframe srcdoc='<script>{run}</script>'></iframe>",
    "<object data='javascript:{run}'></object>",
    "<embed src='javascript:{run}'>",
    "<video><source onerror={run}></video>",
    "<audio src=x onerror={run}>",
    "<body onload={run}>",
    "<details open ontoggle={run}>x</details>",
    "<input autofocus onfocus={run}>",
    "<select autofocus onfocus={run}>",
    "<textarea autofocus onfocus={run}>",
    "<marquee onstart={run}>x</marquee>",
    "<a href='javascript:{run}'>x</a>",
    "<a href='data:text/html,<script>{run}</script>'>x</a>",
    "<form action='javascript:{run}'><button>x</button></form>",
    "<button onclick={run}>x</button>",
    "<base href='https://evil.example/'>",
    "<link rel=stylesheet href='https://evil.example/x.css'>",
    "<meta http-equiv=refresh content='0;url=https://evil.example/'>",
    "<style>@import 'https://evil.example/x.css';</style>",
    "<div style='background:url(https://evil.example/b.png)'>x</div>",
    "<template><script>{run}</script></template>",
    "<noscript><p title='</noscript><img src=x onerror={run}>'>",
    "<table background='https://evil.example/t.png'>",
    "<xss tabindex=1 onfocus={run} autofocus>x</xss>",
    "<dialog open><script>{run}</script></dialog>",
)
_ENDS = (
    "</script><script>{run}</script>",
    "</title><script>{run}</script>",
    "</textarea><script>{run}</script>",
    "</style><script>{run}</script>",
    "--><script>{run}</script>",
    "]]><script>{run}</script>",
    '"><script>{run}</script>',
    "'><script>{run}</script>",
    '" onmouseover={run} x="',
    "' autofocus onfocus={run} x='",
    "javascript:{run}",
    "${{{run}}}",
    "{{{{constructor.constructor('{run}')()}}}}",
    "`;{run};//",
    "';{run};//",
    "\\u003cscript\\u003e{run}\\u003c/script\\u003e",
    "&lt;script&gt;{run}&lt;/script&gt;",
    "%3Cscript%3E{run}%3C/script%3E",
    '\n\ndata: {{"choices":[{{"text":"<script>{run}</script>"}}]}}\n\n',
    "<![CDATA[<img src=x onerror={run}>]]>",
)


def payloads() -> Iterator[str]:
    for text in (*_TAGS, *_ENDS):
        yield text.format(run=_RUN)


PAYLOADS = tuple(payloads())

# Markdown that would lead to script or to a foreign machine, or is too deep for a parser.
MARKDOWN = (
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](javascript&colon;alert(1))",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:alert(1))",
    "[x](blob:alert(1))",
    "[x](//evil.example/)",
    "<javascript:alert(1)>",
    "[x]: javascript:alert(1)\n\n[x]",
    "![x](https://evil.example/p.png)",
    '![x](x "onerror=alert(1)")',
    '[x](https://a.example "\\" onmouseover=alert(1) x=\\"")',
    '[x](https://a.example/"onmouseover=alert(1))',
    "```<img/src=x/onerror=alert(1)>\nx\n```",
    "```html\n<script>alert(1)</script>\n```",
    "```constructor\nx\n```",
    "```__proto__\nx\n```",
    "| <img src=x onerror=alert(1)> |\n|---|\n| <svg onload=alert(1)> |",
    "# <img src=x onerror=alert(1)>",
    "- [x] <input autofocus onfocus=alert(1)>",
    "> <iframe src=javascript:alert(1)>",
    "<details open ontoggle=alert(1)>\n\n**x**\n\n</details>",
    ">" * 5000,
    "[" * 5000,
    "![" * 3000 + "](x)",
    "*_" * 2000 + "x" + "_*" * 2000,
)
