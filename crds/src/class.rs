//! How a changed field of a policy reaches the pods that run.

/// How a changed field reaches the pods that run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Decided in the filter: in force with the bundle, at once.
    Hot,
    /// Part of Envoy's listeners: in force once Envoy took them; connections stay.
    Listener,
    /// Part of the pod: in force when the pod is made anew.
    Pod,
}

impl Class {
    /// Its name, as at the end of the description of every field of the spec.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hot => "Hot",
            Self::Listener => "Listener",
            Self::Pod => "Pod",
        }
    }
}

/// The class of every field of the spec. A field below one of these has the class of the longest path that
/// holds it.
pub const CLASSES: [(&str, Class); 13] = [
    // Envoy's side of it: whether a message passes while the filter can't answer.
    ("mode", Class::Listener),
    ("failurePolicy", Class::Listener),
    // What is computed from it (memory, timeouts) is the pod's; the cap itself is in force before.
    ("limits", Class::Listener),
    ("egress", Class::Hot),
    // Envoy's own guard of the link-local addresses.
    ("egress.platform", Class::Listener),
    ("dns", Class::Hot),
    ("detection", Class::Hot),
    ("cedar", Class::Hot),
    ("exceptions", Class::Hot),
    ("selector", Class::Pod),
    ("capture", Class::Pod),
    ("isolation", Class::Pod),
    ("capacity", Class::Pod),
];

/// The class of a field, given by its path in the spec: `egress.rules`, `limits.maxBodyBytes`.
pub fn class(path: &str) -> Option<Class> {
    let holds =
        |field: &str| path.strip_prefix(field).is_some_and(|r| r.is_empty() || r.starts_with(['.', '[']));
    CLASSES.iter().filter(|(field, _)| holds(field)).max_by_key(|(field, _)| field.len()).map(|(_, c)| *c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_has_the_class_of_what_holds_it() {
        assert_eq!(class("limits.maxBodyBytes"), Some(Class::Listener));
        assert_eq!(class("egress.rules[3].hosts"), Some(Class::Hot));
        assert_eq!(class("capture"), Some(Class::Pod));
        assert_eq!(class("captured"), None);
        assert_eq!(class(""), None);
    }
}
