//! Bodies of chat calls as agents send them: a system prompt, turns, a tool call with its result, tool
//! definitions. Always the same for the same size, so that two runs measure the same work.

use serde_json::{Value, json};

/// Ordinary sentences of a support case, with the digits, names and quotes that scanners stop at.
const SENTENCES: [&str; 16] = [
    "The parcel left the warehouse on Tuesday and is expected within three working days.",
    "Please check whether the second item of the order can still be sent to another address.",
    "According to the manual, the pump needs new seals after 4,000 hours of operation.",
    "I have attached the log of the last run; the import stopped at row 1,284 without a message.",
    "Our team meets every Thursday at 10:30 and would like a summary before that.",
    "The customer asks for a refund of 49.90 because the cable is shorter than described.",
    "Could you translate the following paragraph into plain English and keep the headings?",
    "The function returns a list of tuples; the second element is the number of retries.",
    "She wrote: \"the new version works well, only the export takes longer than before\".",
    "Build 7.3.1 fixes the crash on start-up that was seen on machines with two displays.",
    "If the temperature rises above 70 degrees, the fan runs at full speed for a minute.",
    "Thank you for the quick answer, that solved the problem with the invoice from March.",
    "The table lists, for each region, how many units were sold and how many came back.",
    "Let's compare both offers by price, by delivery time and by the length of the warranty.",
    "A short test with the sample data gave the same result on both systems.",
    "Opening hours are Monday to Friday from 9 to 17, closed on public holidays.",
];

/// A chat call of about `bytes` bytes (never more than 1 % off from 0.5 KB up).
pub(super) fn chat_call(bytes: usize) -> Vec<u8> {
    let mut text = 0;
    // JSON's own share depends on the number of turns; two or three corrections meet the size.
    let mut body = render(text);
    for _ in 0..8 {
        if body.len() == bytes {
            break;
        }
        text = (text + bytes).saturating_sub(body.len());
        body = render(text);
    }
    body
}

/// A call that holds `chars` characters of prose in turns of about 600.
fn render(chars: usize) -> Vec<u8> {
    let mut messages = vec![json!({"role": "system", "content": "You help customers of a hardware shop."})];
    let mut left = chars;
    for turn in 0.. {
        let take = left.min(600);
        let content = prose(turn, take);
        left -= take;
        messages.push(match turn % 4 {
            0 => json!({"role": "user", "content": content}),
            1 => json!({"role": "assistant", "content": content}),
            2 => json!({"role": "user", "content": [{"type": "text", "text": content}]}),
            _ => json!({"role": "tool", "tool_call_id": format!("call_{turn}"), "content": content}),
        });
        if left == 0 {
            break;
        }
    }
    let body = json!({
        "model": "gpt-4o-mini",
        "messages": messages,
        "temperature": 0.2,
        "tools": [tool("find_order", "Finds an order by its number.")],
    });
    body.to_string().into_bytes()
}

fn prose(turn: usize, chars: usize) -> String {
    let text = (0..).map(|i| SENTENCES[(turn * 5 + i * 7) % SENTENCES.len()]);
    let mut out = String::with_capacity(chars + 100);
    for sentence in text {
        if out.len() >= chars {
            break;
        }
        out.push_str(sentence);
        out.push(' ');
    }
    out.truncate(chars); // the sentences are ASCII
    out
}

fn tool(name: &str, description: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "description": description,
        "parameters": {"type": "object", "properties": {"number": {"type": "string"}}}}})
}

/// What the upstream answers: a short completion.
pub(super) fn completion() -> String {
    json!({
        "id": "chatcmpl-0001", "object": "chat.completion", "created": 1_767_225_600, "model": "gpt-4o-mini",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant",
            "content": "The order was sent on Tuesday; it should arrive within three working days."}}],
        "usage": {"prompt_tokens": 120, "completion_tokens": 16, "total_tokens": 136},
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_have_the_wanted_size_and_are_calls() {
        for size in [512, 2 << 10, 10 << 10, 100 << 10] {
            let body = chat_call(size);
            assert!(body.len().abs_diff(size) * 100 <= size, "{size}: {}", body.len());
            let call: Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(call["messages"][0]["role"], "system");
            assert_eq!(body, chat_call(size));
        }
    }
}
