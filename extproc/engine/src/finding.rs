//! What was found, where, and how bad it is.

use serde::{Deserialize, Serialize};

/// Where a text came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Surface {
    /// A URL or a part of one.
    Url,
    /// A header's value.
    Headers,
    /// Text for a model: system, user and assistant messages.
    Prompt,
    /// A tool call: a model's, or a client's to a tool server. `sql` on the command line.
    #[serde(alias = "sql")]
    ToolCall,
    /// What a tool answered.
    ToolResult,
    /// An MCP message from client to server, outside tool arguments.
    McpRequest,
    /// An MCP message from server to client.
    McpResponse,
    /// Any other request body. `text` on the command line.
    #[serde(alias = "text")]
    RequestBody,
    /// Any other response body: web pages, API answers, model output.
    ResponseBody,
    /// A name asked of the resolver.
    Dns,
    /// A command line. `shell` on the command line.
    #[serde(alias = "shell")]
    Exec,
}

impl Surface {
    /// Every surface, in the order of declaration.
    pub const ALL: [Self; 11] = [
        Self::Url,
        Self::Headers,
        Self::Prompt,
        Self::ToolCall,
        Self::ToolResult,
        Self::McpRequest,
        Self::McpResponse,
        Self::RequestBody,
        Self::ResponseBody,
        Self::Dns,
        Self::Exec,
    ];

    /// The surface's name, as users write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Url => "url",
            Self::Headers => "headers",
            Self::Prompt => "prompt",
            Self::ToolCall => "tool_call",
            Self::ToolResult => "tool_result",
            Self::McpRequest => "mcp_request",
            Self::McpResponse => "mcp_response",
            Self::RequestBody => "request_body",
            Self::ResponseBody => "response_body",
            Self::Dns => "dns",
            Self::Exec => "exec",
        }
    }
}

/// What a finding is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "the names are the documentation; design.md section 9 lists them")]
pub enum Category {
    Injection,
    Jailbreak,
    Secret,
    Pii,
    Destructive,
    Command,
    Sqli,
    Web,
    Mcp,
    Exfil,
    Ssrf,
    Url,
    Confidential,
    Identity,
    Bias,
    Protocol,
}

impl Category {
    /// The category's name, as users write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Injection => "injection",
            Self::Jailbreak => "jailbreak",
            Self::Secret => "secret",
            Self::Pii => "pii",
            Self::Destructive => "destructive",
            Self::Command => "command",
            Self::Sqli => "sqli",
            Self::Web => "web",
            Self::Mcp => "mcp",
            Self::Exfil => "exfil",
            Self::Ssrf => "ssrf",
            Self::Url => "url",
            Self::Confidential => "confidential",
            Self::Identity => "identity",
            Self::Bias => "bias",
            Self::Protocol => "protocol",
        }
    }
}

/// How bad a finding is where it was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "four words everybody knows")]
pub enum Severity {
    Low,
    Medium,
    High,
    Critical,
}

impl Severity {
    /// The severity's name, as users write it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
            Self::Critical => "critical",
        }
    }

    /// The severity as Cedar sees it: 1 (low) to 4 (critical).
    pub const fn level(self) -> i64 {
        self as i64 + 1
    }
}

/// One thing a rule found. Never holds the text itself: `evidence` is a hash of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The rule's id, for example `SLP-SEC-0001`.
    pub rule: String,
    /// What it is about.
    pub category: Category,
    /// How bad it is.
    pub severity: Severity,
    /// How sure the rule is, 0 to 100.
    pub score: u8,
    /// Where the text came from.
    pub surface: Surface,
    /// JSON Pointer of the leaf, name of the header, or empty for the whole text.
    pub path: String,
    /// Start of the match: UTF-8 byte offset into the decoded leaf.
    pub start: usize,
    /// End of the match, exclusive.
    pub end: usize,
    /// The view of the text that matched: `raw`, `percent`, `base64`, ...
    pub view: &'static str,
    /// First 16 hex digits of the SHA-256 of the matched text.
    pub evidence: String,
    /// What the policies made of it.
    pub decision: crate::verdict::Decision,
}
